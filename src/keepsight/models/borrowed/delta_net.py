"""Gated delta nets of transformers' modules (those of Qwen3.5 are) by our kernels.

transformers computes a prompt in chunks that begin with its slice, and single tokens in another way; the kernels treat
every token alike, and take a fraction of the time. The matrix products stay the modules' own.
"""

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from keepsight.models import cpu_delta_net
from keepsight.models.delta_net import DeltaNetProducts, DeltaNetStates, DeltaNetWeights
from keepsight.models.gpu_library import kernels_for
from keepsight.models.sequence_rows import SequenceRows

# (hidden states [1, tokens, width], states, sequences) -> [1, tokens, width]
Kernel = Callable[[Tensor, DeltaNetStates, SequenceRows], Tensor]
_Compute = Callable[[DeltaNetWeights, DeltaNetStates, DeltaNetProducts, SequenceRows], Tensor]

_PRODUCTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
_OTHERS = ("conv1d", "norm", "A_log", "dt_bias", "num_k_heads", "layer_norm_epsilon", "layer_idx")


class DeltaNet:
    """A module that kernels can compute."""

    def __init__(self, module: Any) -> None:
        # Of its hidden states.
        self.width: int = module.in_proj_qkv.in_features
        self._module = module
        self._weights = DeltaNetWeights(
            filter=module.conv1d.weight[:, 0].T.contiguous(),
            rate=module.A_log.float().exp(),
            shift=module.dt_bias.contiguous(),
            scale=module.norm.weight.contiguous(),
            key_heads=module.num_k_heads,
            eps=module.layer_norm_epsilon,
        )

    @classmethod
    def of(cls, module: Any) -> Self | None:
        """Return None for a module of another kind."""
        has_parts = all(hasattr(module, each) for each in (*_PRODUCTS, *_OTHERS))
        return cls(module) if has_parts and _is_as_known(module) else None

    def find_kernel(self) -> Kernel | None:
        """Return how all sequences of a step are computed at once; None if no kernel takes it, or none is wanted."""
        if cpu_delta_net.takes_weights(self._weights):
            return lambda *given: self._compute(cpu_delta_net.compute_delta_net, *given)
        kernels = kernels_for(self._weights.filter.device)
        return None if kernels is None else lambda *given: self._compute(kernels.compute_delta_net, *given)

    def _compute(self, compute: _Compute, hidden: Tensor, states: DeltaNetStates, sequences: SequenceRows) -> Tensor:
        module = self._module
        products = DeltaNetProducts(
            mixed=module.in_proj_qkv(hidden[0]),
            decay=module.in_proj_a(hidden[0]),
            strength=module.in_proj_b(hidden[0]),
            gate=module.in_proj_z(hidden[0]),
        )
        return module.out_proj(compute(self._weights, states, products, sequences))[None]  # type: ignore[no-any-return]


def _is_as_known(module: Any) -> bool:
    """Return whether the parts that the kernels replace are what they compute."""
    convolution = module.conv1d
    return (
        isinstance(convolution, nn.Conv1d)
        and convolution.bias is None
        and convolution.groups == convolution.in_channels
        and getattr(module, "activation", None) == "silu"
        and getattr(module.norm, "activation", "silu") == "silu"
    )
