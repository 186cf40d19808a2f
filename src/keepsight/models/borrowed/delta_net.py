"""Gated delta nets of transformers' modules (those of Qwen3.5 are) by our CPU kernel.

transformers computes a prompt in chunks that begin with its slice, and single tokens in another way; the kernel treats
every token alike, and takes a fifth of the time.  The matrix products stay the modules' own.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from keepsight.models.cpu_delta_net import (
    DeltaNetProducts,
    DeltaNetStates,
    DeltaNetWeights,
    Sequences,
    compute_delta_net,
)

# (hidden states [1, tokens, width], states, sequences) -> [1, tokens, width]
Kernel = Callable[[Tensor, DeltaNetStates, Sequences], Tensor]

_PRODUCTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
_OTHERS = ("conv1d", "norm", "A_log", "dt_bias", "num_k_heads", "layer_norm_epsilon", "layer_idx")


def by_kernel(module: Any) -> Kernel | None:
    """Return how to compute a module by the kernel, for all sequences of a step; None if it is no such module, or does
    not fit.
    """
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

    def compute(hidden: Tensor, states: DeltaNetStates, sequences: Sequences) -> Tensor:
        products = DeltaNetProducts(
            mixed=module.in_proj_qkv(hidden[0]),
            decay=module.in_proj_a(hidden[0]),
            strength=module.in_proj_b(hidden[0]),
            gate=module.in_proj_z(hidden[0]),
        )
        return module.out_proj(compute_delta_net(weights, states, products, sequences))[None]  # type: ignore[no-any-return]

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
