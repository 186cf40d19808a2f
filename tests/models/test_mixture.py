"""Each token is computed by the experts its router chose, with the same result by either method and in any batch."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.decoder_config import LayerConfig, MixtureConfig
from keepsight.models.layers import Placement
from keepsight.models.mixture import Mixture
from tests.models.conftest import BUILDS_THAT_ROUND
from tests.models.test_cpu_decoder import (
    CONFIG,
    FAR,
    FLOAT32,
    NEAR,
    QUANTIZED,
    ROUNDED,
    assert_same_in_whatever_company,
    make_decoder,
)

MIXTURE = MixtureConfig(num_experts=9, num_chosen=3, intermediate_size=24)
LAYERS = (LayerConfig(NEAR, 20, MIXTURE), LayerConfig(FAR), LayerConfig(FAR, None, MIXTURE))
MIXED = dataclasses.replace(CONFIG, layers=LAYERS, norms_results=False, activation="silu")


@pytest.mark.usefixtures("build", "threads")
@pytest.mark.parametrize("place", [FLOAT32, QUANTIZED], ids=["float32", "int8"])
def test_a_token_has_the_same_numbers_in_whatever_company(place: Placement) -> None:
    assert_same_in_whatever_company(make_decoder(MIXED, place), torch.float32)


@pytest.mark.usefixtures("rounds", "threads")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
def test_a_token_has_the_same_numbers_where_products_round() -> None:
    assert_same_in_whatever_company(make_decoder(MIXED, ROUNDED), torch.bfloat16)


def make_mixture(num_chosen: int) -> Mixture:
    torch.manual_seed(0)
    mixture = Mixture(FLOAT32, 16, dataclasses.replace(MIXTURE, num_chosen=num_chosen), "silu")
    for slot in mixture.slots():
        slot.fill(torch.randn(slot.shape) / 4)
    return mixture


def compute_plainly(mixture: Mixture, row: Tensor) -> Tensor:
    shares = F.linear(row, mixture.router.weight).softmax(dim=0)
    chosen = shares.sort(descending=True).indices[: mixture.config.num_chosen]
    results = []
    for gate_and_up, down in zip(mixture.gate_and_up[chosen], mixture.down[chosen], strict=True):
        gate, up = (gate_and_up @ row).chunk(2)
        results.append(down @ (F.silu(gate) * up))
    return torch.stack(results).T @ (shares[chosen] / shares[chosen].sum())


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(("num_rows", "num_chosen"), [(0, 3), (1, 1), (40, 3), (40, 9)])
def test_both_ways_give_the_sum_of_a_token_s_experts(num_rows: int, num_chosen: int) -> None:
    mixture, hidden = make_mixture(num_chosen), torch.randn(num_rows, 16)
    expected = torch.stack([torch.zeros(16), *(compute_plainly(mixture, row) for row in hidden)])[1:]
    at_once = mixture(hidden)
    mixture.pack()
    torch.testing.assert_close(at_once, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(mixture(hidden), expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("build")
def test_quantization_covers_the_experts_and_not_the_router() -> None:
    mixture = Mixture(QUANTIZED, 16, MIXTURE, "silu")
    assert mixture.router.weight.dtype is torch.float32
    assert mixture.gate_and_up.dtype is mixture.down.dtype is torch.int8


def test_on_a_gpu_no_shape_depends_on_which_experts_are_chosen() -> None:
    """On the meta device values are unknown, as to a host that does not wait for its GPU: reading one fails."""
    mixture = Mixture(Placement(torch.device("meta"), torch.bfloat16), 16, MIXTURE, "silu")
    assert mixture(torch.empty(5, 16, device="meta", dtype=torch.bfloat16)).shape == (5, 16)
