"""oneDNN's products are torch's, of packed weights and of weights in rows, for any number of tokens and threads."""

from collections.abc import Iterator

import pytest
import torch

from keepsight.models.cpu_products import multiply, pack, pad_rows, takes_products
from keepsight.models.layers import ACTIVATIONS, Linear, Placement

PLACE = Placement(torch.device("cpu"), torch.float32)
pytestmark = pytest.mark.skipif(
    not takes_products(torch.empty(0)), reason="this torch has no oneDNN: torch's own products are used"
)
# Of each precision, and how far its results may be from the exact ones.
PRECISIONS = [
    pytest.param(torch.float32, 1e-4, id="float32"),
    pytest.param(
        torch.bfloat16,
        2e-2,
        id="bfloat16",
        marks=pytest.mark.skipif(
            not takes_products(torch.empty(0, dtype=torch.bfloat16)),
            reason="NO INSTRUCTIONS FOR BFLOAT16 HERE: torch's own products are used",
        ),
    ),
]
NUM_ROWS = [*range(1, 70), 127, 128, 129, 255, 256, 257, 512, 1000]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (513, 5), (384, 256), (256, 1024), (1536, 640)])
def test_the_products_are_those_of_the_rows(shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    packed = pack(weight)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in NUM_ROWS:
            hidden = torch.randn(num_rows, shape[1], generator=generator).to(dtype)
            exact = (hidden.double() @ weight.double().t()).to(dtype)
            for each in (packed, weight):
                torch.testing.assert_close(multiply(hidden, each), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_a_linear_layer_answers_the_same_packed_and_holds_its_weight_once(dtype: torch.dtype, tolerance: float) -> None:
    linear = Linear(Placement(torch.device("cpu"), dtype), 24, {"a": 40, "b": 8}, bias=True)
    for slot in linear.slots():
        slot.fill(torch.randn(slot.shape))
    hidden = torch.randn(9, 24, dtype=dtype)
    before = linear(hidden)
    linear.pack()
    torch.testing.assert_close(linear(hidden), before, rtol=tolerance, atol=tolerance)
    assert linear.weight.dtype is dtype
    assert linear.weight.untyped_storage().nbytes() == dtype.itemsize


def test_a_packed_linear_layer_takes_rows_that_do_not_lie_together() -> None:
    linear = Linear(PLACE, 24, {"a": 40}, bias=False)
    torch.nn.init.normal_(linear.weight)
    hidden = torch.randn(9, 48)[:, 12:36]
    before = linear(hidden)
    linear.pack()
    torch.testing.assert_close(linear(hidden), before)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "silu"])
def test_an_activation_in_the_product_is_the_activation_after_it(
    activation: str, dtype: torch.dtype, tolerance: float
) -> None:
    linear = Linear(Placement(torch.device("cpu"), dtype), 24, {"a": 40}, bias=True)
    for slot in linear.slots():
        slot.fill(torch.randn(slot.shape) * torch.logspace(-6, 1, slot.shape[0]).view(-1, *(1 for _ in slot.shape[1:])))
    hidden = torch.randn(9, 24, dtype=dtype)
    before = linear.then_activate(hidden, ACTIVATIONS[activation])
    linear.pack()
    after = linear.then_activate(hidden, ACTIVATIONS[activation])
    # In bfloat16 what the activation gets is rounded before, or is not.
    relative = tolerance if dtype is torch.bfloat16 else tolerance / 10
    torch.testing.assert_close(after, before, rtol=relative, atol=relative / 10)


@pytest.mark.parametrize(
    ("num_rows", "padded"),
    [(0, 0), (1, 1), (7, 7), (8, 8), (9, 16), (33, 40), (249, 256), (290, 304), (513, 544), (1025, 1088), (2048, 2048)],
)
def test_rows_are_padded_with_zeros_to_few_different_numbers(num_rows: int, padded: int) -> None:
    hidden = torch.randn(num_rows, 8)
    rows = pad_rows(hidden)
    assert rows.shape == (padded, 8)
    assert torch.equal(rows[:num_rows], hidden)
    assert not rows[num_rows:].any()


@pytest.mark.parametrize("hidden", [torch.ones(17, 8, dtype=torch.float64), torch.ones(17, 8, device="meta")])
def test_only_what_is_multiplied_by_these_kernels_is_padded(hidden: torch.Tensor) -> None:
    assert pad_rows(hidden) is hidden
