"""A mixture-of-experts feed-forward: a router chooses a few experts for each token, and their results are weighted.

The order in which a token's results are summed does not depend on the rest of the batch.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepsight.models.cpu_products import Panels
from keepsight.models.decoder_config import MixtureConfig
from keepsight.models.gpu_library import kernels_for
from keepsight.models.layers import (
    ACTIVATIONS,
    Linear,
    Placement,
    WeightSlot,
    empty_matrices,
    empty_scales,
    is_read_in_panels,
    slot,
    without_memory,
)


class _PackedExpert(NamedTuple):
    gate: Panels
    up: Panels
    down: Panels

    def multiply(self, hidden: Tensor, activation: str) -> Tensor:
        gate = self.gate.multiply(hidden, activation=activation)
        return self.down.multiply(self.up.multiply(hidden).mul_(gate))


class Mixture(nn.Module):
    def __init__(self, place: Placement, size: int, config: MixtureConfig, activation: str) -> None:
        super().__init__()
        self.config, self.activation = config, activation
        self.router = Linear(place.for_router(), size, {"gate": config.num_experts}, bias=False)
        self.gate_and_up = empty_matrices(place, config.num_experts, 2 * config.intermediate_size, size)
        self.down = empty_matrices(place, config.num_experts, size, config.intermediate_size)
        self._scales: list[Tensor | None] = [empty_scales(each) for each in (self.gate_and_up, self.down)]
        self._place = place
        self._packed: list[_PackedExpert] = []  # read by the CPU's kernels instead of the two above

    def pack(self) -> None:
        """On a CPU, replace the weights by the layout that the kernels read. Call after they are filled."""
        if not is_read_in_panels(self.down, self._place):
            return
        of_gate_and_up, of_down = self._scales
        halves = self._pack_each(self.gate_and_up, of_gate_and_up, 2 * self.config.num_experts)
        self.gate_and_up = without_memory(self.gate_and_up)
        downs = self._pack_each(self.down, of_down, self.config.num_experts)
        self.down = without_memory(self.down)
        self._packed = list(map(_PackedExpert, halves[::2], halves[1::2], downs))
        self._scales = [None, None]

    def _pack_each(self, weights: Tensor, scales: Tensor | None, count: int) -> list[Panels]:
        split_scales = [None] * count if scales is None else scales.view(count, -1)
        pairs = zip(weights.view(count, -1, weights.shape[-1]), split_scales, strict=True)
        return [Panels(each, None, scales=its, rounds_rows=self._place.rounds) for each, its in pairs]

    def forward(self, hidden: Tensor) -> Tensor:
        if not len(hidden):  # a step of which nothing is read: not every device's products accept zero rows
            return hidden
        num_chosen = self.config.num_chosen
        logits, chosen = self.router(hidden).float().topk(num_chosen)
        # Equals the softmax over all experts, renormalized over the chosen ones.
        shares = logits.softmax(dim=-1).to(hidden.dtype)
        experts, order = chosen.flatten().sort(stable=True)
        tokens = order // num_chosen
        results = (self._one_by_one if self._packed else self._at_once)(hidden[tokens], experts)
        results *= shares.flatten()[order, None]
        if self._packed:
            # Added sequentially: a token's results in the order of its experts' indices.
            return torch.zeros_like(hidden).index_add_(0, tokens, results)
        return torch.empty_like(results).index_copy_(0, order, results).view(len(hidden), num_chosen, -1).sum(dim=1)

    def _one_by_one(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Compute rows [rows, size], sorted by expert, in one call per expert that has rows."""
        counts = Counter(experts.tolist())
        pairs = zip(counts, torch.split(rows, list(counts.values())), strict=True)
        return torch.cat([self._packed[expert].multiply(its_rows, self.activation) for expert, its_rows in pairs])

    def _at_once(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Compute the same in shapes that do not depend on the choice: needs no GPU sync, and can be recorded."""
        numbers = torch.arange(self.config.num_experts, device=rows.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        both = _multiply(rows, self.gate_and_up, ends)
        if kernels := kernels_for(rows.device):
            gated = kernels.gate(both, self.activation)
        else:
            gate, up = both.chunk(2, dim=-1)
            gated = ACTIVATIONS[self.activation](gate) * up
        return _multiply(gated, self.down, ends)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self.router.slots()
        # Published checkpoints have inputs before outputs; transformers 5 saves them as here.
        of_gate_and_up, of_down = self._scales
        yield slot("experts.gate_up_proj", self.gate_and_up, may_be_transposed=True, scales=of_gate_and_up)
        yield slot("experts.down_proj", self.down, may_be_transposed=True, scales=of_down)


def _multiply(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply [rows, inputs], sorted by expert, by [experts, outputs, inputs]; `ends`: end of each expert's rows."""
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
