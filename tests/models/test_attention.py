"""The fast attention equals the plain one for any batch, pages and pictures; and no other keys are read."""

import random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.media import TokenSpan
from keepsight.models import paged_attention
from keepsight.models.attention import AttentionBatch, LayerCache, RequestSlice, View, write_cache
from keepsight.models.block_table import BlockTable
from keepsight.models.gpu_library import without_kernels
from keepsight.models.paged_attention import PagedAttention, plan, plan_rows
from tests.models.copied_bytes import CopiedBytes
from tests.models.reference_attention import ReferenceAttention
from tests.place import DEVICE

HEAD_DIM = 8
NUM_BLOCKS = 64


def pages(*block_ids: int) -> BlockTable:
    return BlockTable(16, block_ids)


def draw_slices(rng: random.Random, block_size: int) -> list[RequestSlice]:
    """Draw requests in every state: fresh, continued, decoding one token; pages are scattered over the pool."""
    free = list(range(NUM_BLOCKS))
    if rng.random() < 0.7:
        rng.shuffle(free)
    slices = []
    for _ in range(rng.randint(1, 4)):
        end = rng.randint(1, block_size * 12)
        start = rng.choice([0, end - 1, rng.randrange(end)])
        blocks = tuple(free.pop() if rng.random() < 0.3 else free.pop(0) for _ in range(-(-end // block_size)))
        slices.append(RequestSlice(start, end - start, BlockTable(block_size, blocks), draw_pictures(rng, end)))
    return slices


def draw_pictures(rng: random.Random, end: int) -> tuple[TokenSpan, ...]:
    spans, position = [], rng.randrange(6)
    while position < end:
        length = min(rng.randint(1, 9), end - position)
        spans.append(TokenSpan(position, length))
        position += length + rng.randrange(5)
    return tuple(spans)


def random_cache(
    kv_heads: int, block_size: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> LayerCache:
    shape = (2, NUM_BLOCKS * block_size, kv_heads, HEAD_DIM)
    return LayerCache(*torch.randn(shape, generator=generator, dtype=dtype))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    view=st.builds(View, st.sampled_from([None, 1, 3, 17, 10_000]), st.booleans()),
    softcap=st.sampled_from([None, None, 2.0]),
    max_bytes=st.sampled_from([0, 2000, 10**6]),
    # float32 goes through products, other dtypes through torch's kernel.
    dtype=st.sampled_from([torch.float32, torch.float64]),
    max_together=st.sampled_from([2, 8]),
)
def test_fast_attention_equals_the_plain_one(
    seed: int,
    block_size: int,
    heads: tuple[int, int],
    view: View,
    softcap: float | None,
    max_bytes: int,
    dtype: torch.dtype,
    max_together: int,
) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_heads, kv_heads = heads
    batch = AttentionBatch(draw_slices(rng, block_size), "cpu")
    query = torch.randn(batch.num_tokens, num_heads, HEAD_DIM, generator=generator, dtype=dtype)
    key, value = torch.randn(2, batch.num_tokens, kv_heads, HEAD_DIM, generator=generator, dtype=dtype)
    cache = random_cache(kv_heads, block_size, generator, dtype)
    write_cache(key, value, cache, batch.slots)
    plain = ReferenceAttention()(query, cache, batch, scale=0.3, view=view, softcap=softcap)
    with (
        patch.object(paged_attention, "MAX_BYTES_TO_COPY", max_bytes),
        patch.object(paged_attention, "MAX_TOKENS_TOGETHER", max_together),
    ):
        fast = PagedAttention()(query, cache, batch, scale=0.3, view=view, softcap=softcap)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("length", [1, 64, 65, 129])
def test_the_last_row_of_a_prompt_sees_all_its_keys_for_any_number_of_rows(length: int, heads: tuple[int, int]) -> None:
    """Uses torch's kernels on any device: one of a GPU's kernels took a last row that was alone for another row."""
    generator, start = torch.Generator().manual_seed(0), 5
    table = BlockTable(16, range(9), DEVICE)
    batch = AttentionBatch([RequestSlice(start, length, table)], DEVICE)
    query = torch.randn(length, heads[0], HEAD_DIM, generator=generator).to(DEVICE)
    cache = random_cache(heads[1], 16, generator)
    cache = LayerCache(cache.keys.to(DEVICE), cache.values.to(DEVICE))
    plain = ReferenceAttention()(query, cache, batch, scale=0.3, view=View(), softcap=None)
    with without_kernels():
        fast = PagedAttention()(query, cache, batch, scale=0.3, view=View(), softcap=None)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


def batch_of_tokens(*lengths: int, device: str = "cpu") -> AttentionBatch:
    """Return a batch of the last token of each request."""
    pieces, first_block = [], 0
    for length in lengths:
        num_blocks = -(-length // 16)
        # Never contiguous, so all are copied to be read.
        block_ids = range(first_block + num_blocks, first_block, -1)
        pieces.append(RequestSlice(length - 1, 1, BlockTable(16, block_ids, device)))
        first_block += num_blocks
    return AttentionBatch(pieces, device)


def test_on_a_gpu_a_long_context_among_short_ones_pads_none_of_them_to_its_length() -> None:
    """With Gemma 3 4b, 256 contexts as long as the longest here would take 128 GiB per layer for keys and values."""
    lengths = [300] * 100 + [131_000] + [300] * 155
    batch = batch_of_tokens(*lengths, device="meta")
    query = torch.empty(256, 8, 256, dtype=torch.bfloat16, device="meta")
    cache = LayerCache(*torch.empty(2, 200_000, 4, 256, dtype=torch.bfloat16, device="meta"))
    parts = plan(batch, View(), paged_attention._FallbackLimits.of(query, cache, None))
    copied = [part.slots.numel() for part in parts if isinstance(part, paged_attention._Tokens)]
    bytes_per_key = 2 * cache.keys[0].nbytes
    assert sorted(copied) == [100 * 300, 155 * 300]
    assert max(copied) * bytes_per_key <= paged_attention.MAX_BYTES_TOGETHER
    assert len(parts) == 3


@pytest.mark.parametrize("max_keys", [40, 80, 10_000])
def test_tokens_give_the_same_in_however_many_groups_they_are_attended_to(max_keys: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = batch_of_tokens(3, 5, 40, 1, 17, 38, 40, 2)
    cache, query = random_cache(2, 16, generator), torch.randn(8, 4, HEAD_DIM, generator=generator)
    as_on_a_gpu = paged_attention._FallbackLimits(False, query.dtype, max_keys, len(query), max_keys)
    plain = ReferenceAttention()(query, cache, batch, scale=0.3, view=View(), softcap=None)
    with patch.object(paged_attention._FallbackLimits, "of", lambda *_: as_on_a_gpu):
        fast = PagedAttention()(query, cache, batch, scale=0.3, view=View(), softcap=None)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1024])
def test_on_a_gpu_the_host_sends_only_where_visible_intervals_begin_and_end(window: int | None) -> None:
    table = BlockTable(16, range(1000), "meta")
    batch = AttentionBatch([RequestSlice(14_000, 2000, table)], "meta")
    with CopiedBytes() as copied:
        groups = plan_rows(batch, 0, 0, View(window), rows_per_group=512)
    assert all(group.mask is not None and group.mask.is_meta for group in groups)
    assert copied.num == 2000 * 2 * 8


def test_a_token_sees_its_whole_picture_and_no_further() -> None:
    batch = AttentionBatch([RequestSlice(0, 9, pages(0), (TokenSpan(2, 3), TokenSpan(5, 2)))], "cpu")
    begin, end = batch.visible(View())
    assert begin.tolist() == [0] * 9
    assert end.tolist() == [1, 2, 5, 5, 5, 7, 7, 8, 9]


def test_a_window_counts_the_token_itself_and_cuts_a_picture_s_past_but_not_its_future() -> None:
    batch = AttentionBatch([RequestSlice(0, 8, pages(0), (TokenSpan(1, 6),))], "cpu")
    begin, end = batch.visible(View(3))
    assert begin.tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert end.tolist() == [1, 7, 7, 7, 7, 7, 7, 8]


def test_in_a_causal_layer_a_picture_s_tokens_see_only_what_comes_before_them() -> None:
    batch = AttentionBatch([RequestSlice(0, 8, pages(0), (TokenSpan(1, 6),))], "cpu")
    begin, end = batch.visible(View(3, is_causal=True))
    assert begin.tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert end.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_slice_may_begin_inside_a_picture_whose_first_keys_are_held() -> None:
    batch = AttentionBatch([RequestSlice(4, 3, pages(0), (TokenSpan(2, 4),))], "cpu")
    assert batch.visible(View())[1].tolist() == [6, 6, 7]


def test_a_slice_that_ends_inside_a_picture_is_our_own_bug() -> None:
    batch = AttentionBatch([RequestSlice(0, 4, pages(0), (TokenSpan(2, 4),))], "cpu")
    with pytest.raises(AssertionError):
        batch.visible(View())


def test_rows_pay_only_for_the_keys_they_can_see() -> None:
    batch = AttentionBatch([RequestSlice(0, 64, pages(*range(4)))], "cpu")
    groups = plan_rows(batch, 0, 0, View(8), rows_per_group=16)
    assert [(group.begin, group.end) for group in groups] == [(0, 16), (9, 32), (25, 48), (41, 64)]


@pytest.mark.parametrize(("window", "num_plans"), [(11, 2), (12, 1)])
def test_a_window_that_reaches_every_beginning_is_ignored(window: int, num_plans: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = AttentionBatch([RequestSlice(4, 8, BlockTable(4, (0, 1, 2)))], "cpu")
    cache, query = random_cache(1, 3, generator), torch.randn(8, 1, HEAD_DIM, generator=generator)
    attention = PagedAttention()
    windowed, whole = (
        attention(query, cache, batch, scale=1.0, view=View(each), softcap=None) for each in (window, None)
    )
    assert len(attention._plans) == num_plans
    assert torch.equal(windowed, whole) == (num_plans == 1)


def test_requests_of_one_batch_never_see_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    both = [RequestSlice(3, 5, BlockTable(4, (0, 1))), RequestSlice(0, 7, BlockTable(4, (2, 3)))]
    cache = random_cache(1, 4, generator)
    query, key, value = torch.randn(3, 12, 1, HEAD_DIM, generator=generator)

    def attend(first: int, slices: list[RequestSlice]) -> torch.Tensor:
        batch = AttentionBatch(slices, "cpu")
        write_cache(key[first:], value[first:], cache, batch.slots)
        return PagedAttention()(query[first:], cache, batch, scale=1.0, view=View(), softcap=None)

    torch.testing.assert_close(attend(0, both)[5:], attend(5, both[1:]))


@pytest.mark.parametrize("read", [[2, 0], [1, 0, 2], [1, 1]], ids=str)
def test_ends_in_another_order_than_they_come_are_refused(read: list[int]) -> None:
    slices = [RequestSlice(0, length, pages(index)) for index, length in enumerate((1, 1, 10))]
    with pytest.raises(AssertionError):
        AttentionBatch(slices, "cpu", read)


def test_layers_of_other_heads_have_plans_of_their_own() -> None:
    """The heads of one layer fit the CPU's kernel, those of the other do not."""
    generator = torch.Generator().manual_seed(0)
    batch = AttentionBatch([RequestSlice(0, 20, BlockTable(4, range(5)))], "cpu")
    attention = PagedAttention()
    for heads, dim in ((2, 64), (64, 64), (2, 60)):
        query = torch.randn(20, heads, dim, generator=generator)
        cache = LayerCache(*torch.randn(2, 20, 1, dim, generator=generator))
        plain = ReferenceAttention()(query, cache, batch, scale=0.3, view=View(), softcap=None)
        fast = attention(query, cache, batch, scale=0.3, view=View(), softcap=None)
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
