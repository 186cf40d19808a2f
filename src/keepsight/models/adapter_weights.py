"""LoRA adapters: they add to a row's product with W its product with B A.

In a step of the decoder each adapter has its own rows. A tower computes all rows with one adapter, through a copy of
the tower with adapted parts. As with the products themselves, a row's results do not depend on the rest of the batch.
Knows nothing of files.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from keepsight.models.layers import Linear, Placement

# The products of a decoder layer that may be adapted, in the order of cpu_decoder.c.
PRODUCTS = ("qkv", "out", "gate", "up", "down")
Tower = TypeVar("Tower")


class LowRank:
    """The low-rank term added to one product, of one or several outputs, stacked."""

    def __init__(self, place: Placement, down: Tensor, up: Tensor) -> None:
        """`down` [rank, inputs], `up` [outputs, rank]; both float32."""
        # Kept in the model's dtype, never rounded further: they are small.
        exact = place._replace(matrix_dtype=None, rounds=False, halves_kv=False)
        self.down, self.up = (_fill(exact, matrix) for matrix in (down, up))

    @property
    def rank(self) -> int:
        return self.up.in_features

    @property
    def dtype(self) -> torch.dtype:
        return self.up.weight.dtype

    def add_to(self, sums: Tensor, hidden: Tensor) -> None:
        """Add the term to `sums` in place."""
        self.up(self.down(hidden), onto=sums)

    def compute(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden))  # type: ignore[no-any-return]


def _fill(place: Placement, matrix: Tensor) -> Linear:
    outputs, inputs = matrix.shape
    linear = Linear(place, inputs, {"": outputs}, bias=False)
    linear.weight.copy_(matrix)
    linear.pack()
    return linear


def stack(outputs: Mapping[str, int], parts: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Combine the (down, up) matrices of some outputs of a product into one pair for the whole product."""
    downs, ups = zip(*(parts[name] for name in outputs if name in parts), strict=True)
    up, first, column = downs[0].new_zeros(sum(outputs.values()), sum(map(len, downs))), 0, 0
    for name, size in outputs.items():
        if name in parts:
            rank = len(parts[name][0])
            up[first : first + size, column : column + rank] = parts[name][1]
            column += rank
        first += size
    assert column == sum(each.shape[1] for each in ups)
    return torch.cat(downs), up


class AdapterWeights:
    def __init__(self, layers: Sequence[Mapping[str, LowRank]], tower: nn.Module | None = None) -> None:
        """`layers`: for each decoder layer, what is added, by the names of `PRODUCTS`.

        `tower`: the adapted tower, for pictures of requests that name the adapter; None: the base model's is used.
        """
        self.layers, self.tower = layers, tower
        # The largest rank in the decoder; 0 if nothing is added there.
        self.rank = max((each.rank for layer in layers for each in layer.values()), default=0)


def choose_tower(tower: Tower, adapter: AdapterWeights | None) -> Tower:
    """Return the adapter's tower, if it has one, else the given one, which is the base model's."""
    return tower if adapter is None or adapter.tower is None else cast("Tower", adapter.tower)


class AdaptedLinear(nn.Module):
    """Replaces a `Linear` where all rows use one adapter."""

    def __init__(self, linear: Linear, added: LowRank) -> None:
        super().__init__()
        self._linear, self._added = linear, added

    def forward(self, hidden: Tensor, activation: str | None = None, onto: Tensor | None = None) -> Tensor:
        if onto is None:
            onto = hidden.new_zeros(*hidden.shape[:-1], self._linear.out_features)
        self._added.add_to(onto, hidden)
        return self._linear(hidden, activation, onto)  # type: ignore[no-any-return]


def adapt(part: nn.Module, added: Mapping[Linear, LowRank]) -> nn.Module:
    """Return a copy of the part with adapted products, sharing all that is unchanged; the part itself if nothing is."""
    if isinstance(part, Linear):
        return AdaptedLinear(part, added[part]) if part in added else part
    parts = {name: adapt(each, added) for name, each in part.named_children()}
    if all(each is parts[name] for name, each in part.named_children()):
        return part
    adapted = copy.copy(part)
    adapted.__dict__["_modules"] = parts
    return adapted


class AdaptedRows(NamedTuple):
    """Rows [first, end) use one adapter."""

    first: int
    end: int
    weights: AdapterWeights


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The adapters for one layer's products, each on some of the rows of a batch."""

    layer: int = 0
    rows: Sequence[AdaptedRows] = ()

    def multiply(self, product: str, linear: Linear, hidden: Tensor, activation: str | None = None) -> Tensor:
        return linear(hidden, activation, self._added(product, linear, hidden) if self.rows else None)  # type: ignore[no-any-return]

    def _added(self, product: str, linear: Linear, hidden: Tensor) -> Tensor:
        """Return the adapters' terms, to which the product is then added before the activation; zero for other rows."""
        added = hidden.new_zeros(len(hidden), linear.out_features)
        for first, end, weights in self.rows:
            if own := weights.layers[self.layer].get(product):
                own.add_to(added[first:end], hidden[first:end])
        return added


NOT_ADAPTED = Adaptation()
