"""Gated delta nets of transformers' modules (those of Qwen3.5 are) by our CPU kernel.

transformers computes a prompt in chunks that begin with its slice, and single tokens in another way; the kernel treats
every token alike, and takes a fifth of the time.  The matrix products stay the modules' own.
"""

from typing import Any

from torch import Tensor, nn

from keepsight.models.borrowed.attention import ComputeModule
from keepsight.models.cpu_delta_net import DeltaNetInputs, DeltaNetWeights, compute_delta_net

_PRODUCTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
_OTHERS = ("conv1d", "norm", "A_log", "dt_bias", "num_k_heads", "layer_norm_epsilon", "layer_idx")


def by_kernel(module: Any) -> ComputeModule | None:
    """Return how to compute a module by the kernel; None if it is none of these, or does not fit."""
    if not all(hasattr(module, name) for name in (*_PRODUCTS, *_OTHERS)) or not _is_as_known(module):
        return None
    weights = DeltaNetWeights(
        filter=module.conv1d.weight[:, 0].T.contiguous(),
        rate=module.A_log.float().exp(),
        shift=module.dt_bias.contiguous(),
        scale=module.norm.weight.contiguous(),
        key_heads=module.num_k_heads,
        eps=module.layer_norm_epsilon,
    )
    if not weights.fit_kernel():
        return None

    def compute(hidden: Tensor, cache: Any) -> Tensor:
        inputs = DeltaNetInputs(
            columns=cache.get_conv_state(module.layer_idx),
            state=cache.get_recurrent_state(module.layer_idx),
            mixed=module.in_proj_qkv(hidden),
            decay=module.in_proj_a(hidden),
            strength=module.in_proj_b(hidden),
            gate=module.in_proj_z(hidden),
        )
        return module.out_proj(compute_delta_net(weights, inputs))  # type: ignore[no-any-return]

    return compute


def _is_as_known(module: Any) -> bool:
    """Return whether the parts that the kernel replaces are what it computes."""
    convolution = module.conv1d
    return (
        isinstance(convolution, nn.Conv1d)
        and convolution.bias is None
        and convolution.groups == convolution.in_channels
        and getattr(module, "activation", None) == "silu"
        and getattr(module.norm, "activation", "silu") == "silu"
    )
