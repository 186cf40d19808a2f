"""A GPU's kernels compute what torch's operations do, and also compile for GPUs that are not present."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepsight.models.attention import attend_plainly
from keepsight.models.layers import ACTIVATIONS
from tests.models import kernels_by_torch
from tests.models.gpu_kernels_here import (
    DEVICE,
    DTYPES,
    MAX_SHARED_BYTES,
    NUM_BYTES,
    Kernel,
    gpu_kernels,
    shared_bytes_of,
)

EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_close(found: Tensor, expected: Tensor, largest: float = 1.0) -> None:
    """`largest`: of the numbers that were added up, which may have cancelled."""
    rounding = 4 * torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding * largest)


# Norms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 72), (0, 8), (2, 3, 640)], ids=str)
def test_rows_are_normed_as_torch_norms_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    hidden, scale = randn(*shape, dtype=dtype), randn(shape[-1])
    assert_close(gpu_kernels.norm(hidden, scale, EPS), kernels_by_torch.norm(hidden, scale, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 72), (0, 8)], ids=str)
@pytest.mark.parametrize("is_normed", [True, False])
def test_added_results_are_normed_where_asked_and_so_are_the_sums(
    shape: tuple[int, int], dtype: torch.dtype, is_normed: bool
) -> None:
    sums, result, of_result, scale = (*randn(2, *shape, dtype=dtype), *randn(2, shape[1]))
    given = (sums, result, of_result if is_normed else None, scale, EPS)
    added, normed = gpu_kernels.add_and_norm(*given)
    assert_close(added, kernels_by_torch.add_and_norm(*given)[0], 10)
    assert_close(normed, kernels_by_torch.norm(added, scale, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 1040), (1, 16), (0, 8)], ids=str)
def test_outputs_are_multiplied_by_their_activated_gates(
    shape: tuple[int, int], activation: str, dtype: torch.dtype
) -> None:
    both = randn(*shape, dtype=dtype) * 3
    assert_close(gpu_kernels.gate(both, activation), kernels_by_torch.gate(both, activation), 10)


def test_rows_that_lie_apart_are_normed_where_they_are() -> None:
    hidden, scale = randn(6, 2, 8).transpose(0, 1), randn(8)
    assert_close(gpu_kernels.norm(hidden, scale, EPS), kernels_by_torch.norm(hidden, scale, EPS))


# Heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norms"), [(4, 2, 24, True), (1, 1, 8, False), (8, 1, 64, True)])
def test_heads_are_normed_and_rotated_and_only_real_tokens_are_written(
    heads: int, kv_heads: int, dim: int, norms: bool, dtype: torch.dtype
) -> None:
    slots = torch.tensor([3, 39, 1, -1, 20], device=DEVICE)
    projected = randn(5, heads + 2 * kv_heads, dim, dtype=dtype)
    scales = randn(heads + kv_heads, dim) if norms else None
    angles = randn(5, 1, dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    keys, values, expected_keys, expected_values = torch.zeros(4, 40, kv_heads, dim, device=DEVICE, dtype=dtype)
    given = (projected, scales, EPS, cos, sin)
    query = gpu_kernels.place_heads(*given, keys, values, slots)
    expected = kernels_by_torch.place_heads(*given, expected_keys, expected_values, slots)
    largest = float(expected.abs().max())
    assert_close(query, expected, largest)
    assert_close(keys, expected_keys, largest)
    assert torch.equal(values, expected_values)
    assert values.any(dim=(1, 2)).nonzero().flatten().tolist() == [1, 3, 20, 39]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 16), (5, 3, 24)])
def test_keys_and_values_of_real_tokens_alone_are_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    key, value = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    keys, values = torch.zeros(2, 9, *shape[1:], dtype=dtype, device=DEVICE)
    slots = torch.tensor([7, -1, 2, 0, -1][: len(key)], device=DEVICE)
    gpu_kernels.write_heads(key, value, keys, values, slots)
    expected_keys, expected_values = torch.zeros_like(keys), torch.zeros_like(values)
    kernels_by_torch.write_heads(key, value, expected_keys, expected_values, slots)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


# Attention ----------------------------------------------------------------------------------------------------


class Rows:
    """Sequences with these numbers of positions, their slots scattered over one cache."""

    def __init__(self, ends: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        num_slots = sum(ends) + 1
        order = torch.randperm(num_slots).to(DEVICE)
        self.slots = [each.clone() for each in torch.split(order[: sum(ends)], ends)]
        self.query = randn(len(ends), heads, dim, dtype=dtype)
        self.keys, self.values = randn(2, num_slots, kv_heads, dim, dtype=dtype)

    def attend(self, rows: list[int], window: int | None, softcap: float | None) -> Tensor:
        slots = [self.slots[row] for row in rows]
        tables = torch.tensor([each.data_ptr() for each in slots], dtype=torch.int64, device=DEVICE)
        ends = torch.tensor([len(each) for each in slots], dtype=torch.int64, device=DEVICE)
        query = self.query[torch.tensor(rows, dtype=torch.int64)]
        out = torch.empty_like(query)
        self._attend(out, query, tables, ends, None, 0.3, window, softcap)
        return out

    def attend_among_others(self, rows: list[int], window: int | None, softcap: float | None) -> Tensor:
        """Attend with each row as the only one of three tokens that is read, among padding rows."""
        slots = [self.slots[row] for row in rows]
        tables, ends, tokens = torch.zeros(3, len(rows) + 2, dtype=torch.int64, device=DEVICE)
        tables[: len(rows)] = torch.tensor([each.data_ptr() for each in slots])
        ends[: len(rows)] = torch.tensor([len(each) for each in slots])
        tokens[: len(rows)] = torch.arange(len(rows)) * 3 + 1
        query = self.query[torch.tensor(rows, dtype=torch.int64)].repeat_interleave(3, dim=0)
        query[::3], query[2::3] = torch.nan, torch.nan
        out = torch.full_like(query, 7.0)
        self._attend(out, query, tables, ends, tokens, 0.3, window, softcap)
        assert (out[::3] == 7).all()
        assert (out[2::3] == 7).all()
        return out[1::3]

    def _attend(self, out: Tensor, query: Tensor, *of_rows: Any) -> None:
        """Attend with so few programs that some take keys several times, while others have nothing to do."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(gpu_kernels, "PROGRAMS_PER_ROW", 8)
            gpu_kernels.attend_rows(out, query, self.keys, self.values, *of_rows)

    def attend_plainly(self, row: int, window: int | None, softcap: float | None) -> Tensor:
        seen = self.slots[row] if window is None else self.slots[row][-window:]
        read = (self.keys[seen].float(), self.values[seen].float())
        return attend_plainly(self.query[row : row + 1].float(), *read, None, 0.3, softcap)[0]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ends=st.lists(st.sampled_from([1, 2, 16, 17, 100, 700]), min_size=1, max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dim=st.sampled_from([8, 24, 64]),
    window=st.sampled_from([None, 1, 17, 100, 10_000]),
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_row_attends_to_what_it_sees_wherever_that_lies(
    seed: int,
    ends: list[int],
    heads: tuple[int, int],
    dim: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(seed)
    rows = Rows(ends, *heads, dim, dtype)
    found = rows.attend(list(range(len(ends))), window, softcap)
    assert torch.equal(rows.attend_among_others(list(range(len(ends))), window, softcap), found)
    expected = torch.stack([rows.attend_plainly(row, window, softcap) for row in range(len(ends))])
    rounding = 1e-5 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(found.float(), expected, rtol=rounding, atol=rounding)


def test_a_row_that_sees_nothing_is_zero_and_company_changes_no_bit() -> None:
    rows = Rows([300, 0, 700, 5], 4, 2, 24, torch.float32)
    together = rows.attend([0, 1, 2, 3], None, None)
    assert not together[1].any()
    for row in range(4):
        assert torch.equal(rows.attend([row], None, None)[0], together[row])


# Real GPUs ----------------------------------------------------------------------------------------------------


def kernels_of(heads: int, kv_heads: int, dim: int, number: str, bytes_per_number: int) -> list[Kernel]:
    model, exact, wide = f"*{number}", "*fp32", "*i64"
    shares = {"sums": exact, "largest": exact, "weights": exact}
    read = {"query": model, "keys": model, "values": model}
    near, far = (gpu_kernels.sight_of(dim, kv_heads, bytes_per_number, window) for window in (1024, None))
    of_norm = {"out": model, "hidden": model, "scale": exact, "size": "i32", "eps": "fp32"}
    of_sums = {"added": model, "out": model, "sums": model, "result": model, "of_result": exact, "scale": exact}
    of_sums |= {"size": "i32", "eps": "fp32"}
    of_gate = {"out": model, "both": model, "wide": "i32"}
    of_heads = {**read, "projected": model, "scales": exact, "cos": model, "sin": model, "slots": wide, "eps": "fp32"}
    of_share = {**shares, **read, "tables": wide, "ends": wide, "places": wide, "scale": "fp32"}
    group = {"GROUP": heads // kv_heads, "LANES": 16, "KV_HEADS": kv_heads}
    kernels: list[tuple[str, dict[str, str], dict[str, Any]]] = [
        ("_norm", of_norm, {"WIDTH": 4096}),
        ("_add_and_norm", of_sums, {"NORMS": True, "WIDTH": 4096}),
        *(("_gate", of_gate, {"ACTIVATION": each, "WIDTH": gpu_kernels.GATED_AT_ONCE}) for each in ACTIVATIONS),
        ("_place_heads", of_heads, {"NORMS": True, "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "WIDTH": dim}),
        (
            "_write_heads",
            {**dict.fromkeys(("keys", "values", "key", "value"), model), "slots": wide},
            {"SIZE": kv_heads * dim, "WIDTH": kv_heads * dim},
        ),
        ("_attend_share", of_share, {"PLACED": False, "SOFTCAP": 0.0, **group, **near}),
        ("_attend_share", of_share, {"PLACED": True, "SOFTCAP": 50.0, **group, **far}),
        (
            "_add_shares",
            {"out": model, **shares, "ends": wide, "places": wide},
            {"PLACED": True, "HEADS": heads, **far},
        ),
    ]
    return [Kernel("gpu_kernels", *each) for each in kernels]


def test_each_kernel_is_compiled_for_gpus_that_are_not_here() -> None:
    kernels = {number: kernels_of(8, 4, 256, number, num_bytes) for number, num_bytes in NUM_BYTES.items()}
    assert max(shared_bytes_of(kernels)) <= MAX_SHARED_BYTES
