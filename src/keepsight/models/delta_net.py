"""The inputs of a gated delta net between its matrix products; cpu_delta_net.c gives the formula."""

from typing import NamedTuple

from torch import Tensor


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


class DeltaNetStates(NamedTuple):
    """The states of sequences before their tokens, in slots; overwritten with those after them."""

    columns: Tensor  # [slots, channels, size]: the last inputs of the convolution
    state: Tensor  # [slots, heads, keys, values]


class DeltaNetProducts(NamedTuple):
    """What the tokens of one sequence after another are projected to; may be overwritten."""

    mixed: Tensor  # [tokens, channels]: queries, keys and values of all heads
    decay: Tensor  # [tokens, heads]: what it is computed from, like `strength`
    strength: Tensor
    gate: Tensor  # [tokens, heads * values]
