"""The feed-forward part of a layer: two products with an activation between them, or with a gate."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.adapter_weights import NOT_ADAPTED, Adaptation
from keepsight.models.gpu_library import kernels_for
from keepsight.models.layers import Linear, Placement, WeightSlot, empty_matrices


class FeedForward(nn.Module):
    def __init__(self, place: Placement, size: int, wide: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(place, size, {"fc1": wide}, bias=True)
        self.down = Linear(place, wide, {"fc2": size}, bias=True)

    def add_to(self, sums: Tensor, hidden: Tensor) -> None:
        """Add the result to `sums` in place."""
        self.down(self.up(hidden, self.activation), onto=sums)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.up.slots()
        yield from self.down.slots()


class GatedFeedForward(nn.Module):
    def __init__(self, place: Placement, size: int, wide: int, activation: str, *, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        # Stacked if a GPU kernel takes both halves of a row. A tower's have biases and are not stacked: adapters
        # replace a tower's `Linear` products, which the stacked product would bypass.
        both = None if bias or kernels_for(place.device) is None else empty_matrices(place, 2 * wide, size).data
        of_gate, of_up = (None, None) if both is None else both.chunk(2)
        self.gate = Linear(place, size, {"gate_proj": wide}, bias=bias, weight=of_gate)
        self.up = Linear(place, size, {"up_proj": wide}, bias=bias, weight=of_up)
        self.down = Linear(place, wide, {"down_proj": size}, bias=bias)
        self._both = both

    def forward(self, hidden: Tensor, adaptation: Adaptation = NOT_ADAPTED) -> Tensor:
        return adaptation.multiply("down", self.down, self._gated(hidden, adaptation))

    def add_to(self, sums: Tensor, hidden: Tensor) -> None:
        """Add the result to `sums` in place."""
        self.down(self._gated(hidden, NOT_ADAPTED), onto=sums)

    def _gated(self, hidden: Tensor, adaptation: Adaptation) -> Tensor:
        kernels = kernels_for(hidden.device)
        if kernels is not None and self._both is not None and not adaptation.rows:
            return kernels.gate(F.linear(hidden, self._both), self.activation)
        gate = adaptation.multiply("gate", self.gate, hidden, self.activation)
        return adaptation.multiply("up", self.up, hidden).mul_(gate)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.gate.slots()
        yield from self.up.slots()
        yield from self.down.slots()
