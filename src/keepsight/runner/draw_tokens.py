"""Draws a token of each row of logits, of those that its request leaves to be drawn.

What a row draws depends on the row and its own point alone.  To sort a vocabulary of 262k takes longer than all else
that a step of a small model does, and nothing here does: of rows with `top_k` or `top_p` the likeliest are looked at
first, and mostly they are enough; where they are not, all are counted (order_tokens.py).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keepsight.runner.order_tokens import CERTAIN, MOST_ROWS, LikeliestFirst
from keepsight.sampling_params import SamplingParams

NEVER = float("-inf")
# More are counted with all the others.
MAX_TOP_K = 1024
# Looked at besides as many again: equals of the last that `top_k` keeps are kept, too, and bfloat16 has many.
SPARE = 64
# Looked at where `top_p` alone is to end them.
NUM_OF_TOP_P = 256
# Sums of so many are kept of a whole vocabulary: a running sum of all is ten times as much to write.
BLOCK = 512

Draw = Callable[[Tensor, Sequence[SamplingParams], Tensor], Tensor]


def draw_tokens(logits: Tensor, params: Sequence[SamplingParams], points: Sequence[float]) -> Tensor:
    """`logits` [rows, vocabulary]; `points`, from 0 to below 1: how far along all that is likely each row falls."""
    drawn = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    fractions = torch.tensor(points, dtype=torch.float64).to(logits.device)[:, None]
    scaled = logits / _column([each.temperature for each in params], logits)
    rows_alike = defaultdict[tuple[Draw, int], list[int]](list)
    for row, each in enumerate(params):
        rows_alike[_draw_of(each, logits.shape[1]), each.top_k].append(row)
    for (draw, _), rows in rows_alike.items():
        drawn[rows] = draw(take_rows(scaled, rows), [params[row] for row in rows], take_rows(fractions, rows))
    return drawn


def take_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Each once, in order.  All of them are not copied."""
    return values if len(rows) == len(values) else values[rows]


def _draw_of(params: SamplingParams, vocab_size: int) -> Draw:
    if params.top_k == 0 and params.top_p == 1:
        return _draw_of_all
    return _draw_of_likeliest if 0 < num_looked_at(params) < vocab_size else _draw_in_order


def num_looked_at(params: SamplingParams) -> int:
    """Of the likeliest; 0: they would not be enough."""
    if params.top_k == 0:
        # What min-p leaves of the others is not known without them.
        return 0 if params.min_p else NUM_OF_TOP_P
    return 2 * params.top_k + SPARE if params.top_k <= MAX_TOP_K else 0


def _draw_of_all(scaled: Tensor, params: Sequence[SamplingParams], fractions: Tensor) -> Tensor:
    return _pick(_rule_out_unlikely(scaled, params).softmax(dim=-1), fractions)[:, 0]


def _draw_of_likeliest(scaled: Tensor, params: Sequence[SamplingParams], fractions: Tensor) -> Tensor:
    """Of the same `top_k`."""
    values, ids = find_likeliest(scaled, num_looked_at(params[0]))
    filtered, has_more = filter_likeliest(values, ids, scaled, params)
    drawn = ids.gather(1, _pick(filtered.softmax(dim=-1), fractions))[:, 0]
    if rows := has_more.nonzero()[:, 0].tolist():
        drawn[rows] = _draw_in_order(take_rows(scaled, rows), [params[row] for row in rows], take_rows(fractions, rows))
    return drawn


def _draw_in_order(scaled: Tensor, params: Sequence[SamplingParams], fractions: Tensor) -> Tensor:
    """Of the same `top_k`."""
    drawn = list[Tensor]()
    for first in range(0, len(scaled), MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        order, kept = keep_in_order(scaled[some], params[some])
        # However that is rounded, a fraction of them below 1 is less than all.
        ids, _ = order.find((kept * fractions[some]).long())
        drawn.append(ids)
    return torch.cat(drawn)


def keep_in_order(scaled: Tensor, params: Sequence[SamplingParams]) -> tuple[LikeliestFirst, Tensor]:
    """And how many shares of each are kept, of those that come first [rows, 1].  All have the same `top_k`."""
    values = _rule_out_unlikely(scaled, params)
    if top_k := params[0].top_k:
        last = scaled.topk(min(top_k, scaled.shape[1]), sorted=False).values.amin(dim=-1, keepdim=True)
        values = values.masked_fill(values < last, NEVER)
    order = LikeliestFirst(values)
    if all(each.top_p == 1 for each in params):
        return order, order.all_shares
    # The last that is kept is the last with more than so much from its own beginning to the end.
    least = (_column(_least_of_rest(params), values) * CERTAIN).long()
    last_place = (order.all_shares - least - 1).clamp(min=0)
    _, kept = order.find(torch.minimum(last_place, order.all_shares - 1))
    return order, kept


def find_likeliest(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """And their ids.  The likeliest come first, of equals the smaller ids; which of the last's equals stay is open."""
    ids = logits.topk(number).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def filter_likeliest(
    values: Tensor, ids: Tensor, scaled: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """What is ruled out is minus infinity.  And of which rows more than these might stay, or equals of the last."""
    if top_k := params[0].top_k:
        last = values[:, top_k - 1, None]
        filtered = _rule_out_rest(_rule_out_unlikely(values, params).masked_fill(values < last, NEVER), params)
        return filtered, ((values[:, -1:] == last) & last.isfinite())[:, 0]
    # All others are as likely as one that is as likely as all of them, and behind these they are cut off like that.
    likely = scaled.softmax(dim=-1).gather(1, ids)
    others = (1 - likely.sum(dim=-1, keepdim=True, dtype=torch.float64)).clamp(min=0)
    times_the_first = (others / likely[:, :1]).to(values.dtype)
    filtered = _rule_out_rest(torch.cat((values, values[:, :1] + times_the_first.log()), dim=1), params)
    kept = filtered[:, :-1]
    return kept, ((values == values[:, -1:]) & kept.isfinite()).any(dim=-1)


def _rule_out_rest(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What top-p rules out, of values in order."""
    if all(each.top_p == 1 for each in params):
        return values
    # How likely each token and all after it are.  Summed from the end: what is small is lost beside what is large.
    rest = values.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)
    # Rounded sums reach neither 0 nor 1 for certain, so the most likely token must stay, and 1 must not cut.
    rest[:, 0] = 2
    return values.masked_fill(rest <= _column(_least_of_rest(params), values), NEVER)


def _rule_out_unlikely(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What min-p rules out, which is as likely as less of the likeliest, is minus infinity."""
    if all(each.min_p == 0 for each in params):
        return values
    likely = (values - values.amax(dim=-1, keepdim=True)).exp()
    return values.masked_fill(likely < _column([each.min_p for each in params], values), NEVER)


def _least_of_rest(params: Sequence[SamplingParams]) -> list[float]:
    """Of each row: top-p keeps a token if it and all after it are more likely than this."""
    return [1 - each.top_p if each.top_p < 1 else -1 for each in params]


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
