"""A gated delta net between its matrix products on a CPU: cpu_delta_net.c, which gives the formula."""

from ctypes import Structure, c_float, c_long, c_void_p
from typing import NamedTuple

from torch import Tensor

from keepsight.models.cpu_kernels import takes_kernels
from keepsight.models.cpu_library import call, number

# The most inputs that a convolution sees at once.
_MOST_COLUMNS = 8
_INPUTS = ("columns", "state", "mixed", "decay", "strength", "gate")
_WEIGHTS = ("filter", "rate", "shift", "scale")


class _DeltaNet(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", *_INPUTS, *_WEIGHTS)),
        *((name, c_long) for name in ("sequences", "tokens", "heads", "key_heads", "keys", "values", "size")),
        ("eps", c_float),
    )


class DeltaNetWeights(NamedTuple):
    """The weights that are not of matrix products."""

    filter: Tensor  # [size, channels]: of the convolution
    rate: Tensor  # [heads]: of decay, times softplus of its input plus `shift`
    shift: Tensor  # [heads]
    scale: Tensor  # [values]: of the norm
    key_heads: int
    eps: float

    @property
    def key_size(self) -> int:
        """The size of a head's queries and keys."""
        num_values = len(self.rate) * len(self.scale)
        return (self.filter.shape[1] - num_values) // (2 * self.key_heads)

    def fit_kernel(self) -> bool:
        size, channels = self.filter.shape
        fits = takes_kernels(self.filter) and size <= _MOST_COLUMNS
        return fits and not any(each % number("numbers_at_once") for each in (channels, len(self.scale)))


class DeltaNetInputs(NamedTuple):
    """Products of the tokens of sequences of equal length, and the states before the first ones."""

    columns: Tensor  # [sequences, channels, size]: the last inputs of the convolution; overwritten
    state: Tensor  # [sequences, heads, keys, values]; overwritten
    mixed: Tensor  # [sequences, tokens, channels]: queries, keys and values of all heads; overwritten
    decay: Tensor  # [sequences, tokens, heads]: what it is computed from; overwritten, like `strength`
    strength: Tensor
    gate: Tensor  # [sequences, tokens, heads * values]


def compute_delta_net(weights: DeltaNetWeights, inputs: DeltaNetInputs) -> Tensor:
    """Return the outputs [sequences, tokens, heads * values]; overwrite the states with those after the last tokens."""
    out, (num_sequences, num_tokens, _) = inputs.gate.new_empty(inputs.gate.shape), inputs.mixed.shape
    heads, keys, values, size = len(weights.rate), weights.key_size, len(weights.scale), len(weights.filter)
    assert inputs.state.shape == (num_sequences, heads, keys, values)
    assert inputs.columns.shape == (num_sequences, inputs.mixed.shape[2], size)
    tensors = (out, *inputs, weights.filter, weights.rate, weights.shift, weights.scale)
    assert all(takes_kernels(each) and each.is_contiguous() for each in tensors)
    addresses = (each.data_ptr() for each in tensors)
    sizes = (num_sequences, num_tokens, heads, weights.key_heads, keys, values, size)
    call("compute_delta_net", _DeltaNet(*addresses, *sizes, weights.eps))
    return out
