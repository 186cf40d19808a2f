"""A GPU's attention of longer slices equals the plain one, and compiles for GPUs that are not present.

Tests go through the plan, which tells the kernel what the rows of a step see.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepsight.media import TokenSpan
from keepsight.models.attention import AttentionBatch, LayerCache, RequestSlice, View
from keepsight.models.block_table import BlockTable
from keepsight.models.paged_attention import PagedAttention, _SlicesOnDevice, plan_on_device
from tests.models.copied_bytes import CopiedBytes
from tests.models.gpu_kernels_here import (
    DEVICE,
    DTYPES,
    MAX_SHARED_BYTES,
    NUM_BYTES,
    Kernel,
    gpu_kernels,
    gpu_slices,
    kernels_in_use,
    shared_bytes_of,
)
from tests.models.reference_attention import ReferenceAttention

BLOCK_SIZE, NUM_BLOCKS = 4, 128


@contextmanager
def small_tiles() -> Iterator[None]:
    """Make tiles small, so that few rows make several blocks, and few keys exceed what a program holds at once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gpu_slices, "MOST_LANES", 16)
        monkeypatch.setattr(gpu_slices, "MOST_KEYS", 16)
        yield


WHOLE = View()


class Step:
    """Slices of several sequences, whose pages are scattered over one cache."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],  # start and length
        heads: tuple[int, int],
        dim: int,
        pictures: Sequence[tuple[TokenSpan, ...]] = (),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator, free = torch.Generator().manual_seed(seed), list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(free)
        slices = []
        for (start, length), seen in zip(spans, pictures or [()] * len(spans), strict=True):
            pages = [free.pop() for _ in range(-(-(start + length) // BLOCK_SIZE))]
            slices.append(RequestSlice(start, length, BlockTable(BLOCK_SIZE, pages, DEVICE), seen))
        self.batch = AttentionBatch(slices, DEVICE)
        num_heads, kv_heads = heads
        numbers = (torch.randn(2, NUM_BLOCKS * BLOCK_SIZE, kv_heads, dim, generator=generator)).to(DEVICE, dtype)
        self.cache = LayerCache(*numbers)
        self.query = torch.randn(self.batch.num_tokens, num_heads, dim, generator=generator).to(DEVICE, dtype)

    def attend(self, view: View = WHOLE, softcap: float | None = None) -> Tensor:
        with kernels_in_use(), small_tiles():
            return PagedAttention()(self.query, self.cache, self.batch, scale=0.3, view=view, softcap=softcap)

    def assert_as_plain(self, view: View = WHOLE, softcap: float | None = None) -> None:
        exact = LayerCache(self.cache.keys.float(), self.cache.values.float())
        plain = ReferenceAttention()(self.query.float(), exact, self.batch, scale=0.3, view=view, softcap=softcap)
        rounding = 1e-5 if self.query.dtype is torch.float32 else 5e-3
        found = self.attend(view, softcap)
        assert found.dtype is self.query.dtype
        torch.testing.assert_close(found.float(), plain, rtol=rounding, atol=rounding)


# Which keys a row sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 24, 64])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (5, 1), (24, 1)], ids=str)
def test_a_prompt_is_attended_to_causally_whatever_its_heads(
    heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    Step([(0, 37)], heads, dim, dtype=dtype).assert_as_plain()


@pytest.mark.parametrize("window", [1, 5, 16, 40, 1000])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    Step([(30, 50)], (4, 2), 8).assert_as_plain(View(window))


@pytest.mark.parametrize("window", [None, 3])
def test_pictures_are_seen_whole_even_those_that_began_before_the_slice(window: int | None) -> None:
    pictures = (TokenSpan(7, 6), TokenSpan(20, 30), TokenSpan(50, 1), TokenSpan(51, 4))
    Step([(9, 46)], (4, 2), 8, [pictures]).assert_as_plain(View(window))


def test_scores_are_capped() -> None:
    Step([(21, 40)], (4, 2), 8).assert_as_plain(softcap=2.0)


@pytest.mark.parametrize("spans", [[(0, 17), (5, 2), (90, 33)], [(3, 1), (0, 9), (70, 1), (11, 20)], [(0, 2), (40, 1)]])
def test_slices_of_a_step_each_see_their_own_sequence_wherever_they_stand_among_single_tokens(
    spans: list[tuple[int, int]],
) -> None:
    Step(spans, (4, 2), 8).assert_as_plain()


# Shares -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_slices, "LEAST_KEYS_PER_SHARE", 16)


@pytest.mark.usefixtures("small_shares")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (200, 2.0), (3, None)])
def test_long_contexts_of_few_rows_are_shared_out_and_summed(
    window: int | None, softcap: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second sequence sees fewer keys than there are shares.
    step = Step([(400, 11), (2, 2)], (4, 2), 24, dtype=dtype)
    shares, count = list[int](), gpu_slices.num_shares

    def note(*sizes: int) -> int:
        shares.append(count(*sizes))
        return shares[-1]

    monkeypatch.setattr(gpu_slices, "num_shares", note)
    step.assert_as_plain(View(window), softcap)
    assert shares == [{None: 16, 200: 8, 3: 1}[window]]


def test_few_blocks_with_much_to_see_are_shared_out_and_no_others() -> None:
    most, least = gpu_slices.MOST_PROGRAMS, gpu_slices.LEAST_KEYS_PER_SHARE
    assert gpu_slices.num_shares(12, 4, 356) == 1
    assert gpu_slices.num_shares(64, 4, 2048) == 1
    assert gpu_slices.num_shares(1, 1, least * 4) == 4
    assert gpu_slices.num_shares(1, 1, least * 5) == 4
    assert gpu_slices.num_shares(10 * most, 1, 100_000) == 1
    # This bounds the memory for their partial results.
    assert all(blocks * gpu_slices.num_shares(blocks, 1, 10**6) <= most for blocks in range(1, most))


# Any step -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    heads=st.sampled_from([(1, 1), (4, 2), (5, 1)]),
    dim=st.sampled_from([8, 24, 64]),
    view=st.builds(View, st.sampled_from([None, 1, 17, 60, 10_000]), st.booleans()),
    softcap=st.sampled_from([None, 2.0]),
    least_keys=st.sampled_from([16, 512]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_step_is_attended_to_as_the_plain_formula_says(
    seed: int,
    heads: tuple[int, int],
    dim: int,
    view: View,
    softcap: float | None,
    least_keys: int,
    dtype: torch.dtype,
) -> None:
    rng = random.Random(seed)
    spans = [
        (rng.choice([0, rng.randrange(90)]), rng.choice([1, rng.randint(2, 30)])) for _ in range(rng.randint(1, 4))
    ]
    pictures = [draw_pictures(rng, start + length) for start, length in spans]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gpu_slices, "LEAST_KEYS_PER_SHARE", least_keys)
        Step(spans, heads, dim, pictures, dtype, seed).assert_as_plain(view, softcap)


def draw_pictures(rng: random.Random, end: int) -> tuple[TokenSpan, ...]:
    cuts = sorted({rng.randint(0, end) for _ in range(rng.randrange(6))})
    return tuple(TokenSpan(start, stop - start) for start, stop in pairwise(cuts) if rng.random() < 0.6)


# Input of the device ------------------------------------------------------------------------------------------


def test_the_rows_of_a_block_are_of_one_slice_and_those_that_see_most_come_first() -> None:
    batch = Step([(0, 20), (90, 1), (30, 9)], (2, 1), 8).batch
    plan = plan_on_device(batch, View(), gpu_kernels, rows_per_block=8)
    assert isinstance(plan, _SlicesOnDevice)
    longer, singles = plan.longer, plan.singles
    assert singles is not None
    first, _, last = (piece.table.address for piece in batch.slices)
    assert longer.blocks.tolist() == [[29, 1, last], [21, 8, last], [16, 4, first], [8, 8, first], [0, 8, first]]
    assert longer.seen[[0, 19, 21, 29]].tolist() == [[0, 1], [0, 20], [0, 31], [0, 39]]
    assert longer.num_blocks == 5
    assert longer.longest == 39  # a single token sees more, but is not one of these
    assert singles.tokens.tolist() == [20, 0]
    assert singles.ends.tolist() == [91, 0]  # and one padding row: their number is even


def test_the_visible_intervals_of_a_step_are_sent_in_one_copy() -> None:
    table = BlockTable(BLOCK_SIZE, range(1000), "meta")
    batch = AttentionBatch([RequestSlice(2000, 1000, table), RequestSlice(0, 24, table)], "meta")
    with CopiedBytes() as copied:
        plan_on_device(batch, View(), gpu_kernels, rows_per_block=32)
    assert copied.num_copies == 1
    assert copied.num == 8 * (2 * 1024 + 3 * (32 + 1))


def test_for_single_tokens_among_slices_all_windows_read_one_copy() -> None:
    table = BlockTable(BLOCK_SIZE, range(1000), "meta")
    batch = AttentionBatch([RequestSlice(0, 24, table), RequestSlice(2000, 1, table)], "meta")
    with CopiedBytes() as copied:
        for window in (None, 16):
            plan_on_device(batch, View(window), gpu_kernels, rows_per_block=32)
    assert copied.num_copies == 2 + 1  # each window reads its own copy for longer slices


def test_single_tokens_give_the_same_bits_whatever_slices_are_beside_them() -> None:
    step = Step([(90, 1), (0, 20), (33, 1)], (4, 2), 24)
    beside = step.attend()
    for index, row in ((0, 0), (2, 21)):
        alone = AttentionBatch([step.batch.slices[index]], DEVICE)
        with kernels_in_use():
            query = step.query[row : row + 1]
            found = PagedAttention()(query, step.cache, alone, scale=0.3, view=View(), softcap=None)
        assert torch.equal(found[0], beside[row])


# Real GPUs ----------------------------------------------------------------------------------------------------


def kernels_of(number: str, num_bytes: int) -> Iterator[Kernel]:
    model, exact = f"*{number}", "*fp32"
    read = {"query": model, "keys": model, "values": model, "seen": "*i64", "blocks": "*i64"}
    for group, dim, shares in ((2, 256, True), (4, 128, False), (5, 64, False)):
        tile = gpu_slices.tile_of(group, dim, num_bytes)
        sums = dict.fromkeys(("sums", "largest", "weights"), exact if shares else model)
        constants = {
            "CAPS": shares,
            "SHARES": shares,
            "LEAST": 512,
            "KV_HEADS": 4,
            **tile,
            **gpu_slices.launch_of(tile),
        }
        yield Kernel("gpu_slices", "_attend_block", {**sums, **read, "factor": "fp32", "to_cap": "fp32"}, constants)
    types = {"out": model, **dict.fromkeys(("sums", "largest", "weights"), exact), "num_shares": "i32"}
    yield Kernel("gpu_slices", "_add_shares", types, {"DIM": 256, "WIDTH": 256})


def test_each_kernel_is_compiled_for_gpus_that_are_not_here() -> None:
    kernels = {number: list(kernels_of(number, num_bytes)) for number, num_bytes in NUM_BYTES.items()}
    assert max(shared_bytes_of(kernels)) <= MAX_SHARED_BYTES
