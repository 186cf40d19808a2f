"""CPU products are exact, and each row's result is the same to the last bit in any batch."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models.cpu_library import number
from keepsight.models.cpu_products import Panels, takes_panels
from keepsight.models.layers import ACTIVATIONS, Linear, Placement
from keepsight.models.quantize_rows import quantize_rows
from tests.models.conftest import BUILDS, BUILDS_THAT_ROUND

pytestmark = pytest.mark.usefixtures("build", "threads")
CPU = torch.device("cpu")
# [outputs, inputs]: less than a vector, odd sizes, panels that share a thread, several blocks of inputs of each kind.
SHAPES = [(1, 1), (7, 33), (513, 5), (40, 801), (96, 32), (384, 256), (96, 3072)]
ROUNDING = ("bfloat16 by the same", "int8 by bfloat16")
NUM_ROWS = [0, 1, 2, 5, 6, 7, 11, 12, 13, 25, 60, 145, 290, 700]

of_each_kind = pytest.mark.parametrize(
    ("build", "kind"),
    [
        *itertools.product(BUILDS, ["float32", "bfloat16", "int8"]),
        *itertools.product(BUILDS_THAT_ROUND, ["bfloat16 by the same", "int8 by bfloat16"]),
    ],
    indirect=True,
)
of_each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.fixture
def kind(request: pytest.FixtureRequest, build: None) -> str:
    if request.param in ROUNDING:
        request.getfixturevalue("rounds")
    return str(request.param)


def draw_weight(outputs: int, inputs: int, kind: str) -> Tensor:
    """Draw a weight that its kind stores exactly: for int8, scales are powers of 2."""
    if kind.startswith("int8"):
        whole = torch.randint(-127, 128, (outputs, inputs))
        whole[:, -1] = 127
        return whole * 2.0 ** torch.randint(-9, -6, (outputs, 1))
    weight = torch.randn(outputs, inputs)
    return weight if kind == "float32" else weight.bfloat16()


def make_panels(weight: Tensor, kind: str, bias: Tensor | None = None) -> Panels:
    scales = None
    if kind.startswith("int8"):
        whole, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
        quantize_rows(whole, scales, weight)
        weight = whole
    return Panels(weight, bias, scales=scales, rounds_rows=kind in ROUNDING)


def exact(hidden: Tensor, weight: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    if kind in ROUNDING:
        hidden = hidden.bfloat16()
    return F.linear(hidden.double(), weight.double(), None if bias is None else bias.double())


@of_each_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_the_exact_ones(shape: tuple[int, int], kind: str) -> None:
    weight, bias = draw_weight(*shape, kind), torch.randn(shape[0])
    for num_rows in NUM_ROWS:
        hidden = torch.randn(num_rows, shape[1])
        for each in (None, bias):
            product = make_panels(weight, kind, each).multiply(hidden)
            assert product.dtype is torch.float32
            torch.testing.assert_close(product.double(), exact(hidden, weight, kind, each), rtol=1e-5, atol=2e-4)


@of_each_kind
@pytest.mark.parametrize("shape", SHAPES)
@of_each_activation
def test_a_row_has_the_same_numbers_in_whatever_company_and_by_however_many_threads(
    activation: str, shape: tuple[int, int], kind: str
) -> None:
    panels = make_panels(draw_weight(*shape, kind), kind, torch.randn(shape[0]))
    hidden = torch.randn(700, shape[1])
    alone = torch.cat([panels.multiply(row[None], activation=activation) for row in hidden[:40]])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, end in ((0, 40), (0, 700), (3, 20), (39, 700), (7, 300)):
            together = panels.multiply(hidden[first:end], activation=activation)
            count = min(end, 40) - first
            assert torch.equal(together[:count], alone[first : first + count])


def test_a_weight_without_inputs_is_refused_before_a_kernel_divides_by_their_number() -> None:
    with pytest.raises(AssertionError, match="the kernels divide"):
        make_panels(torch.empty(3, 0), "float32")


@of_each_kind
def test_nan_in_one_row_leaves_the_others_alone(kind: str) -> None:
    panels = make_panels(draw_weight(40, 24, kind), kind)
    hidden = torch.randn(9, 24)
    before = panels.multiply(hidden)
    hidden[3, 5], hidden[6, 0] = torch.nan, torch.inf
    after = panels.multiply(hidden)
    assert after[3].isnan().all()
    assert not after[6].isfinite().any()
    others = [0, 1, 2, 4, 5, 7, 8]
    assert torch.equal(after[others], before[others])


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
def test_rows_are_rounded_as_torch_rounds() -> None:
    bits = torch.randint(-(2**31), 2**31, (20_000,))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3895e38, -3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])
    hidden = torch.cat((bits.to(torch.int32).view(torch.float32), special))
    # The processor treats smaller ones as zero.
    hidden[hidden.abs() < 2.0**-126] = 0.0
    identity = Panels(torch.eye(1).bfloat16(), None, rounds_rows=True)
    rounded = identity.multiply(hidden[:, None])[:, 0]
    torch.testing.assert_close(rounded, hidden.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


@of_each_kind
@of_each_activation
def test_an_activation_is_as_exact_as_torch_s(activation: str, kind: str) -> None:
    # Sums of integers are scaled only at the end.
    large = torch.logspace(-30, 36 if kind.startswith("int8") else 38.5, 300)
    hidden = torch.cat((torch.linspace(-12, 12, 4001), torch.linspace(-120, 120, 4001), large, -large))[:, None]
    # Nearly 1, and exact in each kind.
    weight = draw_weight(1, 1, kind).fill_(127 / 128)
    expected = ACTIVATIONS[activation](exact(hidden, weight, kind))
    activated = make_panels(weight, kind).multiply(hidden, activation=activation)
    torch.testing.assert_close(activated.double(), expected, rtol=1e-5, atol=1e-6)


@of_each_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_adding_to_the_output_equals_a_separate_addition(shape: tuple[int, int], kind: str) -> None:
    panels = make_panels(draw_weight(*shape, kind), kind, torch.randn(shape[0]))
    for num_rows in NUM_ROWS:
        hidden, others = torch.randn(num_rows, shape[1]), torch.randn(num_rows, shape[0])
        expected = panels.multiply(hidden)
        sums = others.clone()
        assert panels.multiply(hidden, onto=sums) is sums
        torch.testing.assert_close(sums, expected + others, rtol=1e-5, atol=2e-4)


@of_each_kind
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_weight_are_read_back(shape: tuple[int, int], kind: str) -> None:
    weight = draw_weight(*shape, kind)
    for count in (0, 1, 7, 900):
        which = torch.randint(shape[0], (count,))
        assert torch.equal(make_panels(weight, kind).rows(which), weight[which].float())


def test_arguments_that_the_kernel_would_misread_are_refused() -> None:
    whole_numbers = torch.ones(8, 4, dtype=torch.int8)
    for weight, scales in ((whole_numbers, None), (torch.ones(8, 4), torch.ones(8))):
        with pytest.raises(AssertionError):
            Panels(weight, None, scales=scales)
    panels, hidden, whole = make_panels(torch.ones(8, 4), "float32"), torch.ones(3, 4), torch.ones(3, 8)
    for other in (whole.double(), whole.bfloat16(), whole[:2], whole[:, :1].expand(3, 8)):
        with pytest.raises(AssertionError):
            panels.multiply(hidden, onto=other)
    for which in (torch.ones(3, dtype=torch.int32), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(AssertionError):
            panels.rows(which)


# No narrower dtype here: a wrong one would write past the end of its memory.
@of_each_kind
def test_products_do_not_depend_on_torch_s_default_precision(
    kind: str, set_default_dtype: Callable[[str], None]
) -> None:
    weight, bias, hidden = draw_weight(40, 24, kind), torch.randn(40), torch.randn(5, 24)
    panels = make_panels(weight, kind, bias)
    product, rows = panels.multiply(hidden), panels.rows(torch.arange(40))
    set_default_dtype("float64")
    panels = make_panels(weight, kind, bias)
    assert torch.equal(panels.multiply(hidden), product)
    assert torch.equal(panels.rows(torch.arange(40)), rows)


@of_each_kind
def test_a_weight_in_panels_takes_the_memory_of_its_numbers(kind: str) -> None:
    weight = draw_weight(5 * number("panel"), 64, kind)
    bytes_of_number = 1 if kind.startswith("int8") else weight.itemsize
    assert make_panels(weight, kind)._weight.nbytes == weight.numel() * bytes_of_number


def place_of(kind: str) -> Placement:
    if kind == "float32":
        return Placement(CPU, torch.float32)
    return Placement(CPU, torch.float32, torch.int8 if kind.startswith("int8") else torch.bfloat16, kind in ROUNDING)


def filled_linear(kind: str, **outputs: int) -> Linear:
    linear = Linear(place_of(kind), 24, outputs, bias=True)
    for slot in linear.slots():
        slot.fill(torch.randn(slot.shape))
    return linear


def weight_of(linear: Linear) -> Tensor:
    """Return the weight before it is packed."""
    scales = linear._scales
    return linear.weight.clone() if scales is None else linear.weight * scales[:, None]


@of_each_kind
def test_a_linear_layer_multiplies_by_what_it_was_filled_with_and_holds_it_once(kind: str) -> None:
    linear = filled_linear(kind, a=40, b=8)
    weight, bias = weight_of(linear), linear.bias
    hidden = torch.randn(9, 48)[:, 12:36]  # not contiguous
    linear.pack()
    torch.testing.assert_close(linear(hidden).double(), exact(hidden, weight, kind, bias), rtol=1e-5, atol=1e-4)
    assert linear.weight.shape == weight.shape
    assert linear.weight.untyped_storage().nbytes() == linear.weight.itemsize
    assert torch.equal(linear.rows(torch.tensor([47, 3])), weight[[47, 3]].float())


@of_each_kind
@of_each_activation
def test_an_activation_in_the_product_is_the_activation_after_it(activation: str, kind: str) -> None:
    linear = filled_linear(kind, a=40)
    weight, bias = weight_of(linear), linear.bias
    hidden = torch.randn(9, 24)
    linear.pack()
    after = linear(hidden, activation)
    expected = ACTIVATIONS[activation](exact(hidden, weight, kind, bias))
    torch.testing.assert_close(after.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight", [torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, device="meta")])
def test_weights_unknown_to_the_kernel_are_left_to_torch(weight: Tensor) -> None:
    assert not takes_panels(weight)
    linear = Linear(Placement(weight.device, weight.dtype), 2, {"a": 2}, bias=False)
    linear.pack()
    assert linear(weight).shape == (2, 2)
