"""What follows attention in a layer: two products with an activation between them, or with a gate."""

from collections.abc import Iterator

from torch import Tensor, nn

from keepsight.models.adapter_weights import NOT_ADAPTED, Adaptation
from keepsight.models.layers import Linear, Placement, WeightSlot


class FeedForward(nn.Module):
    def __init__(self, place: Placement, size: int, wide: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(place, size, {"fc1": wide}, bias=True)
        self.down = Linear(place, wide, {"fc2": size}, bias=True)

    def add_to(self, sums: Tensor, hidden: Tensor) -> None:
        """Changes `sums`."""
        self.down.add_to(sums, self.up.then_activate(hidden, self.activation))

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.up.slots()
        yield from self.down.slots()


class GatedFeedForward(nn.Module):
    def __init__(self, place: Placement, size: int, wide: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate = Linear(place, size, {"gate_proj": wide}, bias=bias)
        self.up = Linear(place, size, {"up_proj": wide}, bias=bias)
        self.down = Linear(place, wide, {"down_proj": size}, bias=bias)

    def forward(self, hidden: Tensor, adaptation: Adaptation = NOT_ADAPTED) -> Tensor:
        return adaptation.multiply("down", self.down, self._gated(hidden, adaptation))

    def add_to(self, sums: Tensor, hidden: Tensor) -> None:
        """Changes `sums`."""
        self.down.add_to(sums, self._gated(hidden, NOT_ADAPTED))

    def _gated(self, hidden: Tensor, adaptation: Adaptation) -> Tensor:
        gate = adaptation.multiply("gate", self.gate, hidden, self.activation)
        return adaptation.multiply("up", self.up, hidden).mul_(gate)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.gate.slots()
        yield from self.up.slots()
        yield from self.down.slots()
