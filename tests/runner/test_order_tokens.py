"""Searches without sorting find what a stable sort of each row finds, up to the last share."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepsight.runner.order_tokens import MOST_ROWS, NUM_SHARES, LikeliestFirst

KINDS = ("random", "flat", "peaked", "tied", "equal", "rare", "zeros", "far", "close")


def row_of(kind: str, seed: int, vocab_size: int) -> Tensor:
    numbers = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
    if kind == "zeros":
        return torch.copysign(torch.zeros_like(numbers), numbers)
    if kind == "rare":
        kept = numbers > 1.5
        kept[seed % vocab_size] = True
        return numbers.masked_fill(~kept, -torch.inf)
    if kind == "close":  # all in one bucket, yet different
        return 10 + numbers / 1e6
    scales = {"random": 3.0, "flat": 0.01, "peaked": 300.0, "tied": 3.0, "equal": 0.0, "far": 5e37}
    scaled = numbers * scales[kind]
    return scaled.bfloat16().float() if kind == "tied" else scaled


def find_by_sorting(order: LikeliestFirst, places: Tensor) -> tuple[Tensor, Tensor]:
    ids = order.values.sort(dim=-1, descending=True, stable=True).indices
    ends = order.shares.gather(1, ids).cumsum(dim=-1)
    found = torch.searchsorted(ends, places, right=True)
    return ids.gather(1, found)[:, 0], ends.gather(1, found)


@settings(max_examples=200)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=MOST_ROWS),
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from((1, 2, 50, 3000)),
    fraction=st.one_of(st.just(0.0), st.just(1 - 2**-53), st.floats(0, 1 - 2**-53)),
)
def test_found_tokens_equal_those_of_a_stable_sort(
    kinds: list[str], seed: int, vocab_size: int, fraction: float
) -> None:
    order = LikeliestFirst(torch.stack([row_of(kind, seed + row, vocab_size) for row, kind in enumerate(kinds)]))
    places = (order.all_shares.double() * fraction).long()
    ids, ends = order.find(places)
    judged_ids, judged_ends = find_by_sorting(order, places)
    assert torch.equal(ids, judged_ids)
    assert torch.equal(ends, judged_ends)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_as_likely_as_torch_says(kind: str) -> None:
    values = row_of(kind, 5, 3000)[None]
    likely = values.double().softmax(dim=-1)
    shares = LikeliestFirst(values).shares.double() / NUM_SHARES
    torch.testing.assert_close(shares, likely, rtol=1e-5, atol=1 / NUM_SHARES)


def test_as_many_rows_as_allowed_are_counted_together_without_overflow() -> None:
    values = torch.full((MOST_ROWS, 300), -torch.inf)
    tokens = torch.arange(MOST_ROWS) * 7 + 3
    values[torch.arange(MOST_ROWS), tokens] = 0
    order = LikeliestFirst(values)
    ids, ends = order.find(order.all_shares - 1)
    assert torch.equal(ids, tokens)
    assert ends.tolist() == [[int(NUM_SHARES)]] * MOST_ROWS


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_of_nan_has_shares_and_does_not_change_other_rows(value: float) -> None:
    values = torch.stack([row_of("random", 1, 300), torch.full((300,), value), row_of("tied", 2, 300)])
    order = LikeliestFirst(values)
    ids, ends = order.find(order.all_shares // 2)
    alone = LikeliestFirst(values[::2])
    expected_ids, expected_ends = alone.find(alone.all_shares // 2)
    assert torch.equal(ids[::2], expected_ids)
    assert torch.equal(ends[::2], expected_ends)
    assert 0 <= ids[1] < 300
