"""A gated delta net between its matrix products on a CPU: cpu_delta_net.c, which gives the formula."""

from ctypes import Structure, c_float, c_long, c_void_p

from torch import Tensor

from keepsight.models.cpu_kernels import takes_kernels
from keepsight.models.cpu_library import call, number
from keepsight.models.delta_net import DeltaNetProducts, DeltaNetStates, DeltaNetWeights
from keepsight.models.sequence_rows import SequenceRows

# The most inputs that a convolution sees at once.
_MOST_COLUMNS = 8
_STATES, _PRODUCTS = ("columns", "state"), ("mixed", "decay", "strength", "gate")
_WEIGHTS, _PLACES = ("filter", "rate", "shift", "scale"), ("first_rows", "slots", "kept_slots")


class _DeltaNet(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("out", *_STATES, *_PRODUCTS, *_WEIGHTS, *_PLACES)),
        *((name, c_long) for name in ("sequences", "heads", "key_heads", "keys", "values", "size")),
        ("eps", c_float),
    )


def takes_weights(weights: DeltaNetWeights) -> bool:
    size, channels = weights.filter.shape
    fits = takes_kernels(weights.filter) and size <= _MOST_COLUMNS
    return fits and not any(each % number("lanes") for each in (channels, len(weights.scale)))


def compute_delta_net(
    weights: DeltaNetWeights, states: DeltaNetStates, products: DeltaNetProducts, sequences: SequenceRows
) -> Tensor:
    """Return the outputs [tokens, heads * values]. Overwrites the products, except for the gate."""
    out = products.gate.new_empty(products.gate.shape)
    heads, keys, values, size = len(weights.rate), weights.key_size, len(weights.scale), len(weights.filter)
    assert states.state.shape[1:] == (heads, keys, values)
    assert states.columns.shape[1:] == (weights.filter.shape[1], size)
    tensors = (out, *states, *products, weights.filter, weights.rate, weights.shift, weights.scale)
    assert all(takes_kernels(each) and each.is_contiguous() for each in tensors)
    addresses = (each.data_ptr() for each in (*tensors, sequences.first_rows, sequences.slots, sequences.kept_slots))
    sizes = (len(sequences.slots), heads, weights.key_heads, keys, values, size)
    call("compute_delta_net", _DeltaNet(*addresses, *sizes, weights.eps))
    return out
