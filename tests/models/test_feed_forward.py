"""Gate and up projections are one product where a GPU's kernel takes both, with the same results."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.adapter_weights import Adaptation, AdaptedRows, AdapterWeights, LowRank
from keepsight.models.feed_forward import GatedFeedForward
from keepsight.models.gpu_library import without_kernels
from keepsight.models.layers import Placement
from tests.models.gpu_kernels_here import DEVICE, gpu_kernels, kernels_in_use

PLACE = Placement(DEVICE, torch.float32)
SIZE, WIDE, RANK = 24, 40, 2


def make_feed_forward() -> GatedFeedForward:
    made = GatedFeedForward(PLACE, SIZE, WIDE, "silu", bias=False)
    for slot in made.slots():
        slot.fill(torch.randn(slot.shape) / 4)
    return made


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_the_output_is_the_same_after_the_kernels_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, gated = gpu_kernels.gate, list[Tensor]()

    def note(both: Tensor, activation: str) -> Tensor:
        gated.append(both)
        return gate(both, activation)

    monkeypatch.setattr(gpu_kernels, "gate", note)
    with kernels_in_use():
        feed_forward, hidden = make_feed_forward(), torch.randn(5, SIZE).to(DEVICE)
        found = feed_forward(hidden)
        with without_kernels():
            expected = feed_forward(hidden)
    assert [each.shape for each in gated] == [(5, 2 * WIDE)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_weights_are_listed_and_counted_once() -> None:
    with kernels_in_use():
        feed_forward = make_feed_forward()
    weights = list(feed_forward.parameters())
    assert sum(each.numel() for each in weights) == 3 * SIZE * WIDE
    assert len({each.untyped_storage().data_ptr() for each in weights}) == 2


def test_rows_of_an_adapter_equal_those_of_merged_weights_and_others_are_unchanged() -> None:
    with kernels_in_use():
        feed_forward, hidden = make_feed_forward(), torch.randn(5, SIZE).to(DEVICE)
        down, up = torch.randn(RANK, SIZE), torch.randn(WIDE, RANK)
        added = AdapterWeights([{"gate": LowRank(PLACE, down, up)}])
        found = feed_forward(hidden, Adaptation(0, [AdaptedRows(2, 4, added)]))
        plain = feed_forward(hidden)
    merged = feed_forward.gate.weight + (up @ down).to(DEVICE)
    opened = F.silu(F.linear(hidden, merged)) * F.linear(hidden, feed_forward.up.weight)
    expected = torch.cat((plain[:2], F.linear(opened, feed_forward.down.weight)[2:4], plain[4:]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, plain, rtol=1e-2)
