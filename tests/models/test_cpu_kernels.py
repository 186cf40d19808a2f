"""CPU kernels give what torch gives, for any sizes, threads and numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepsight.models import cpu_kernels
from keepsight.models.cpu_kernels import Sight, attend_to_all
from keepsight.models.cpu_library import number
from keepsight.models.cpu_products import multiplies_bfloat16
from tests.models.conftest import BUILDS_THAT_ROUND

pytestmark = pytest.mark.usefixtures("build", "threads")


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 7), (2, 5, 64), (33, 1152), (300, 256)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_a_norm_is_torch_s(shape: tuple[int, ...], eps: float) -> None:
    hidden, scale = torch.randn(shape), torch.randn(shape[-1])
    expected = F.rms_norm(hidden, shape[-1:], scale, eps)
    torch.testing.assert_close(cpu_kernels.norm(hidden, scale, eps), expected)


def test_a_norm_of_zeros_is_zeros() -> None:
    assert not cpu_kernels.norm(torch.zeros(3, 24), torch.ones(24), 1e-6).any()


@pytest.mark.parametrize("num_tokens", [0, 1, 34, 700])
def test_angles_are_as_exact_as_torch_s_at_the_longest_context_too(num_tokens: int) -> None:
    positions = torch.randint(2**17, (num_tokens,))
    frequencies = 1 / torch.tensor([[1e4], [1e6]]) ** torch.linspace(0, 1, 20)
    cos, sin = cpu_kernels.angles(positions, frequencies)
    exact = (positions[:, None].float() * frequencies[:, None]).double()
    expected = torch.cat((exact.cos(), exact.cos()), dim=-1), torch.cat((-exact.sin(), exact.sin()), dim=-1)
    for ours, theirs in zip((cos, sin), expected, strict=True):
        torch.testing.assert_close(ours[:, :, 0], theirs.float(), rtol=0, atol=2e-7)


@pytest.mark.parametrize("length", [0.0, 1.0, 100.0, 1e4], ids=lambda length: f"of length {length:g}")
@pytest.mark.parametrize("dim", [8, 24, 72, 256])
def test_attention_is_as_exact_as_torch_s_whatever_the_scores(dim: int, length: float) -> None:
    def directions() -> Tensor:
        return F.normalize(torch.randn(200, dim), dim=-1)

    query, key, value = length * directions(), length * directions(), 100 * directions()
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    by_torch = F.scaled_dot_product_attention(query[None], key[None], value[None])[0]
    ours = torch.empty_like(query)
    attend_to_all(query, key, value, dim**-0.5, ours)
    assert (ours - exact).abs().max() <= 1e-5 + 5 * (by_torch - exact).abs().max()


@pytest.mark.parametrize("lowest", [-1e31, -1e38])
def test_the_highest_score_counts_however_low_it_is(lowest: float) -> None:
    query, keys, values = torch.full((1, 8), lowest / 16), torch.ones(3, 8), torch.randn(3, 8)
    keys[0], keys[2] = 2.0, 1.5
    attended = torch.empty(1, 8)
    for rounds in {False, multiplies_bfloat16()}:
        attend_to_all(query, keys, values, 1.0, attended, rounds=rounds)
        torch.testing.assert_close(attended[0], values[1], rtol=2**-8, atol=0)


def test_keys_that_no_row_sees_are_not_read() -> None:
    query, keys, values = torch.randn(3, 40, 2, 8)
    begins, ends = torch.arange(40) // 2, torch.arange(40) // 2 + 3
    keys[22:], values[22:] = torch.nan, torch.nan
    slots = torch.arange(40)
    seen = Sight([40], [slots], begins, ends).attend(query, keys, values, 1.0)
    for row in range(40):
        own = slice(int(begins[row]), int(ends[row]))
        alone = Sight([1], [slots[own]], torch.tensor([0]), torch.tensor([3]))
        torch.testing.assert_close(seen[row], alone.attend(query[row, None], keys, values, 1.0)[0])


@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_position_of_nan_makes_nan_of_the_rows_that_see_it_and_of_no_others(num_rows: int) -> None:
    """Its key alone would get no weight; but key and value are computed from the same numbers."""
    query, keys, values = torch.randn(2 * num_rows, 2, 64), torch.randn(60, 1, 64), torch.randn(60, 1, 64)
    keys[5], values[5] = torch.nan, torch.nan
    query[-1, 1] = torch.nan
    slots, other = torch.arange(30), torch.arange(30, 60)
    begins = torch.zeros(2 * num_rows, dtype=torch.int64)
    attended = Sight([num_rows] * 2, [slots, other], begins, begins + 30).attend(query, keys, values, 1.0)
    assert attended[:num_rows].isnan().all()
    assert attended[num_rows:-1].isfinite().all()
    assert attended[-1].isnan().all(dim=-1).tolist() == [False, True]


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
def test_values_that_are_not_finite_do_not_reach_earlier_tiles() -> None:
    query, keys, values = (
        torch.randn(640, 1, 64),
        torch.randn(641, 1, 64).bfloat16(),
        torch.randn(641, 1, 64).bfloat16(),
    )
    first_tile = number("queries_per_tile")
    values[first_tile + 1] = torch.inf
    ends = torch.arange(640) + 2
    seen = Sight([640], [torch.arange(641)], torch.zeros(640, dtype=torch.int64), ends).attend(query, keys, values, 1.0)
    assert seen[:first_tile].isfinite().all()
    assert not seen[first_tile:].isfinite().any()


def assert_same_in_whatever_company(window: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Compare in a full batch, in smaller ones, and alone, which takes another path if there is enough to compute."""
    query, keys, values = torch.randn(700, heads, dim), torch.randn(700, 1, dim), torch.randn(700, 1, dim)
    keys, values, slots = keys.to(dtype), values.to(dtype), torch.randperm(700)
    ends = torch.arange(700) + 1
    begins = (ends - window).clamp(min=0)
    together = Sight([700], [slots], begins, ends).attend(query, keys, values, 1.0)
    for some in (slice(0, 1), slice(127, 129), slice(300, 301), slice(301, 340), slice(698, 699), slice(699, 700)):
        fewer = Sight([some.stop - some.start], [slots], begins[some].clone(), ends[some].clone())
        assert torch.equal(fewer.attend(query[some], keys, values, 1.0), together[some])


@pytest.mark.parametrize("window", [5, 200, 1000])
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (4, 80), (7, 8)])
def test_a_row_has_the_same_numbers_in_whatever_company(window: int, heads: int, dim: int) -> None:
    assert_same_in_whatever_company(window, heads, dim, torch.float32)


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
@pytest.mark.parametrize("window", [5, 200, 1000])
@pytest.mark.parametrize(("heads", "dim"), [(1, 32), (4, 160), (7, 8)])
def test_a_row_with_bfloat16_keys_has_the_same_numbers_in_whatever_company(window: int, heads: int, dim: int) -> None:
    assert_same_in_whatever_company(window, heads, dim, torch.bfloat16)


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("dim", [8, 64, 96])
def test_attention_to_keys_of_bfloat16_is_that_of_rounded_numbers(num_rows: int, dim: int) -> None:
    query, keys, values = torch.randn(num_rows, 6, dim), torch.randn(300, 2, dim), torch.randn(300, 2, dim)
    keys, values, slots = keys.bfloat16(), values.bfloat16(), torch.randperm(300)
    begins, ends = torch.randint(150, (num_rows,)), torch.randint(151, 300, (num_rows,))
    attended = Sight([num_rows], [slots], begins, ends).attend(query, keys, values, 0.25)
    # The kernel scales before it rounds, because it computes powers of 2 instead of exponentials.
    scaled = (query * (0.25 / math.log(2))).bfloat16().double() * math.log(2)
    for row in range(num_rows):
        seen = slots[begins[row] : ends[row]]
        key, value = (each[seen].double().repeat_interleave(3, dim=1).transpose(0, 1) for each in (keys, values))
        exact = F.scaled_dot_product_attention(scaled[row, :, None], key, value, scale=1.0)[:, 0]
        assert (attended[row] - exact).abs().max() <= 2**-8 * value.abs().max()


def test_rows_may_lie_apart_and_so_may_what_they_are_written_to() -> None:
    together, room = torch.randn(50, 3, 16), torch.zeros(50, 2, 16)
    query, key, value = together.unbind(1)
    attend_to_all(query, key, value, 0.25, room[:, 1])
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.25)
    torch.testing.assert_close(room[:, 1], expected)
    assert not room[:, 0].any()


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
@pytest.mark.parametrize("num_keys", [1, 2, 7, 127, 128, 129, 500])
@pytest.mark.parametrize("dim", [8, 72])
@pytest.mark.parametrize("length", [0.0, 1.0, 100.0], ids=lambda length: f"of length {length:g}")
def test_rounded_attention_is_that_of_rounded_numbers(num_keys: int, dim: int, length: float) -> None:
    query, key = (length * F.normalize(torch.randn(num, dim), dim=-1) for num in (45, num_keys))
    together, room = torch.randn(num_keys, 2, dim), torch.zeros(45, 2, dim)
    key, value = together[:, 0].copy_(key), together[:, 1]
    attend_to_all(query, key, value, 0.25, room[:, 1], rounds=True)
    # The kernel scales before it rounds, because it computes powers of 2 instead of exponentials.
    scaled = (query * (0.25 / math.log(2))).bfloat16().double() * math.log(2)
    exact = F.scaled_dot_product_attention(scaled, key.bfloat16().double(), value.bfloat16().double(), scale=1.0)
    assert (room[:, 1] - exact).abs().max() <= 2**-8 * value.abs().max()
    assert not room[:, 0].any()


@pytest.mark.usefixtures("rounds")
@pytest.mark.parametrize("build", BUILDS_THAT_ROUND, indirect=True)
def test_a_row_of_rounded_attention_has_the_same_numbers_in_whatever_company() -> None:
    query, key, value = torch.randn(300, 24), torch.randn(200, 24), torch.randn(200, 24)
    together = torch.empty_like(query)
    attend_to_all(query, key, value, 0.25, together, rounds=True)
    for some in (slice(0, 1), slice(31, 33), slice(100, 250)):
        fewer = torch.empty_like(query[some])
        attend_to_all(query[some], key, value, 0.25, fewer, rounds=True)
        assert torch.equal(fewer, together[some])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(33, 1, 8), (4, 4, 14), (1, 1, 6), (1, 1, 1032)])
def test_heads_of_other_numbers_are_left_to_torch(heads: int, kv_heads: int, dim: int) -> None:
    assert cpu_kernels.can_attend(torch.empty(1, 8, 8), 1)
    assert not cpu_kernels.can_attend(torch.empty(1, heads, dim), kv_heads)


@pytest.mark.parametrize("hidden", [torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, 8, device="meta")])
def test_only_float32_on_a_cpu_is_taken(hidden: Tensor) -> None:
    assert not cpu_kernels.takes_kernels(hidden)
