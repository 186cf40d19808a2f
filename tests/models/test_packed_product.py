"""A weight packed once gives the products that it gives in rows, for any number of tokens and threads."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from keepsight.models.layers import ACTIVATIONS, Linear, Placement
from keepsight.models.packed_product import can_pack, multiply_packed, pack_rows

pytestmark = pytest.mark.skipif(
    not can_pack(), reason="this torch has no packed products (no MKL): weights stay in rows"
)
PLACE = Placement(torch.device("cpu"), torch.float32)
NUM_ROWS = [*range(1, 70), 127, 128, 129, 255, 256, 257, 512, 1000]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (513, 5), (384, 256), (256, 1024), (1536, 640)])
def test_the_products_are_those_of_the_rows(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator)
    packed = pack_rows(weight)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in NUM_ROWS:
            hidden = torch.randn(num_rows, shape[1], generator=generator)
            exact = (hidden.double() @ weight.double().t()).float()
            torch.testing.assert_close(multiply_packed(hidden, packed, weight, None), exact, rtol=1e-4, atol=1e-4)


def test_a_linear_layer_answers_the_same_packed_and_holds_its_weight_once() -> None:
    linear = Linear(PLACE, 24, {"a": 40, "b": 8}, bias=True)
    for slot in linear.slots():
        slot.fill(torch.randn(slot.shape))
    hidden = torch.randn(9, 24)
    before = linear(hidden)
    linear.pack()
    torch.testing.assert_close(linear(hidden), before)
    assert linear.weight.untyped_storage().nbytes() == 4


def test_a_packed_linear_layer_takes_rows_that_do_not_lie_together() -> None:
    linear = Linear(PLACE, 24, {"a": 40}, bias=False)
    torch.nn.init.normal_(linear.weight)
    hidden = torch.randn(9, 48)[:, 12:36]
    before = linear(hidden)
    linear.pack()
    torch.testing.assert_close(linear(hidden), before)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 300])
def test_gelu_written_out_is_torch_s_own(num_rows: int) -> None:
    wide = torch.randn(num_rows, 64) * torch.logspace(-6, 6, 64)
    for hidden in (wide, wide[:, ::2], wide[:, 32:]):
        torch.testing.assert_close(
            ACTIVATIONS["gelu_pytorch_tanh"](hidden), F.gelu(hidden, approximate="tanh"), rtol=1e-5, atol=1e-6
        )
