"""Draws a token of each row of logits, of those that its request leaves to be drawn.

What a row draws depends on the row and its own point alone.  To sort a vocabulary of 262k takes longer than all else
that a step of a small model does; so of rows with `top_k` or `top_p` the likeliest are looked at first, and mostly they
are enough.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from keepsight.sampling_params import SamplingParams

NEVER = float("-inf")
# More are sorted with all the others.
MAX_TOP_K = 1024
# Looked at besides as many again: equals of the last that `top_k` keeps are kept, too, and bfloat16 has many.
SPARE = 64
# Looked at where `top_p` alone is to end them.
NUM_OF_TOP_P = 1024
# Times as many are looked at next: a quarter of all takes a third of the time that all take.
AGAIN = 16
# Sums of so many are kept of a whole vocabulary: a running sum of all is ten times as much to write.
BLOCK = 512


def draw_tokens(logits: Tensor, params: Sequence[SamplingParams], points: Sequence[float]) -> Tensor:
    """`logits` [rows, vocabulary]; `points`, from 0 to below 1: how far along all that is likely each row falls."""
    drawn = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    fractions = torch.tensor(points, dtype=torch.float64).to(logits.device)[:, None]
    scaled = logits / _column([each.temperature for each in params], logits)
    rows_alike = defaultdict[tuple[bool, int | None], list[int]](list)
    for row, each in enumerate(params):
        rows_alike[each.top_k > 0, num_looked_at(each, logits.shape[1])].append(row)
    for (_, number), rows in rows_alike.items():
        own = [params[row] for row in rows]
        drawn[rows] = _draw(take_rows(scaled, rows), own, take_rows(fractions, rows), number)
    return drawn


def take_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Each once, in order.  All of them are not copied."""
    return values if len(rows) == len(values) else values[rows]


def num_looked_at(params: SamplingParams, vocab_size: int) -> int | None:
    """Of the likeliest, at first; None: at all, in no order."""
    if 0 < params.top_k <= MAX_TOP_K:
        return 2 * params.top_k + SPARE
    if params.top_k == 0 and params.top_p == 1:
        return None
    # What min-p leaves of the others is not known without them.
    return vocab_size if params.top_k or params.min_p else NUM_OF_TOP_P


def _draw(scaled: Tensor, params: Sequence[SamplingParams], fractions: Tensor, number: int | None) -> Tensor:
    if number is None:
        return _pick(filter_candidates(scaled, params).softmax(dim=-1), fractions)[:, 0]
    values, ids = find_likeliest(scaled, number)
    filtered, has_more = filter_likeliest(values, ids, scaled, params)
    drawn = ids.gather(1, _pick(filtered.softmax(dim=-1), fractions))[:, 0]
    if rows := has_more.nonzero()[:, 0].tolist():
        drawn[rows] = _draw(scaled[rows], [params[row] for row in rows], fractions[rows], AGAIN * number)
    return drawn


def filter_likeliest(
    values: Tensor, ids: Tensor, scaled: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """And of which rows more than these would stay."""
    if values.shape == scaled.shape:
        return filter_candidates(values, params), torch.zeros(len(values), dtype=torch.bool)
    if params[0].top_k:
        last = _take_last(values, params)[:, 0]
        return filter_candidates(values, params), (values[:, -1] == last) & last.isfinite()
    # All others are as likely as one that is as likely as all of them, and behind these they are cut off like that.
    likely = scaled.softmax(dim=-1).gather(1, ids)
    others = (1 - likely.sum(dim=-1, keepdim=True, dtype=torch.float64)).clamp(min=0)
    times_the_first = (others / likely[:, :1]).to(values.dtype)
    filtered = filter_candidates(torch.cat((values, values[:, :1] + times_the_first.log()), dim=1), params)
    return filtered[:, :-1], filtered[:, -1].isfinite()


def find_likeliest(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """And their ids.  The likeliest come first, of equals the smaller ids; which of the last's equals stay is open."""
    if number >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(number).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def filter_candidates(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What min-p, top-k and top-p rule out is minus infinity.  With any of the latter two `values` are in order."""
    if any(each.min_p for each in params):
        # As likely as the likeliest is 1.
        likely = (values - values.amax(dim=-1, keepdim=True)).exp()
        values = values.masked_fill(likely < _column([each.min_p for each in params], values), NEVER)
    if any(each.top_k for each in params):
        last = _take_last(values, params)
        values = values.masked_fill(values < last, NEVER)
    if any(each.top_p < 1 for each in params):
        # How likely each token and all after it are.  Summed from the end: what is small is lost beside what is large.
        rest = values.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)
        # Rounded sums reach neither 0 nor 1 for certain, so the most likely token must stay, and 1 must not cut.
        rest[:, 0] = 2
        least = _column([1 - each.top_p if each.top_p < 1 else -1 for each in params], values)
        values = values.masked_fill(rest <= least, NEVER)
    return values


def _take_last(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Of each row in order, what is the last that its `top_k` keeps."""
    width = values.shape[1]
    places = [min(each.top_k or width, width) - 1 for each in params]
    last = values.gather(1, torch.tensor(places, device=values.device)[:, None])
    return last.masked_fill(torch.tensor([each.top_k == 0 for each in params], device=values.device)[:, None], NEVER)


def _column(numbers: list[float], values: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=values.device)[:, None]


def _pick(likely: Tensor, fractions: Tensor) -> Tensor:
    """The place of each row [rows, 1] where the sum up to it passes that fraction of the whole.

    Block by block first.  However many there are, each is as likely as it should be to some 1e-7 of it.
    """
    num_missing = -likely.shape[1] % BLOCK
    padded = torch.nn.functional.pad(likely, (0, num_missing)) if num_missing else likely
    blocks = padded.view(len(padded), -1, BLOCK)
    ends = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    goals = ends[:, -1:] * fractions
    block = _find_passing(ends, goals)
    begins = torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.take_along_dim(block[:, :, None], dim=1)[:, 0].cumsum(dim=-1, dtype=torch.float64)
    return block * BLOCK + _find_passing(inside, goals - begins)


def _find_passing(sums: Tensor, goals: Tensor) -> Tensor:
    """The first that is larger, where something was added, however the goal was rounded."""
    below_all = sums[:, -1:] * (1 - 2**-53)
    return (sums <= torch.minimum(goals, below_all)).sum(dim=-1, keepdim=True)
