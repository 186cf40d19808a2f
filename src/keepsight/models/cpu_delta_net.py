"""A gated delta net between its matrix products on a CPU: cpu_delta_net.c, which gives the formula."""

from ctypes import Structure, c_float, c_long, c_void_p
from typing import NamedTuple

from torch import Tensor

from keepsight.models.cpu_kernels import takes_kernels
from keepsight.models.cpu_library import call, number

# The most inputs that a convolution sees at once.
_MOST_COLUMNS = 8
_STATES, _PRODUCTS = ("columns", "state"), ("mixed", "decay", "strength", "gate")
_WEIGHTS, _PLACES = ("filter", "rate", "shift", "scale"), ("first_rows", "slots")


class _DeltaNet(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", *_STATES, *_PRODUCTS, *_WEIGHTS, *_PLACES)),
        *((name, c_long) for name in ("sequences", "heads", "key_heads", "keys", "values", "size")),
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
        return fits and not any(each % number("lanes") for each in (channels, len(self.scale)))


class DeltaNetStates(NamedTuple):
    """The states of sequences before their tokens, in slots; overwritten with those after them."""

    columns: Tensor  # [slots, channels, size]: the last inputs of the convolution
    state: Tensor  # [slots, heads, keys, values]


class DeltaNetProducts(NamedTuple):
    """What the tokens of one sequence after another are projected to; overwritten, except for the gate."""

    mixed: Tensor  # [tokens, channels]: queries, keys and values of all heads
    decay: Tensor  # [tokens, heads]: what it is computed from, like `strength`
    strength: Tensor
    gate: Tensor  # [tokens, heads * values]


class Sequences(NamedTuple):
    """Which rows of a batch are the tokens of which sequence.  On the host."""

    first_rows: Tensor  # [sequences + 1]: of each sequence, and behind the last
    slots: Tensor  # [sequences]


def compute_delta_net(
    weights: DeltaNetWeights, states: DeltaNetStates, products: DeltaNetProducts, sequences: Sequences
) -> Tensor:
    """Return the outputs [tokens, heads * values]."""
    out = products.gate.new_empty(products.gate.shape)
    heads, keys, values, size = len(weights.rate), weights.key_size, len(weights.scale), len(weights.filter)
    assert states.state.shape[1:] == (heads, keys, values)
    assert states.columns.shape[1:] == (weights.filter.shape[1], size)
    tensors = (out, *states, *products, weights.filter, weights.rate, weights.shift, weights.scale)
    assert all(takes_kernels(each) and each.is_contiguous() for each in tensors)
    addresses = (each.data_ptr() for each in (*tensors, *sequences))
    sizes = (len(sequences.slots), heads, weights.key_heads, keys, values, size)
    call("compute_delta_net", _DeltaNet(*addresses, *sizes, weights.eps))
    return out
