"""Draws a token from each row of logits, under the row's temperature, top-k, top-p and min-p.

The drawn token depends on the row and its own random point alone. Sorting a vocabulary of 262k takes longer than all
else in a small model's step, so nothing here does: for `top_k` or `top_p` the likeliest tokens are examined first,
which is mostly enough; where it is not, all tokens are counted (order_tokens.py).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keepsight.runner.order_tokens import MOST_ROWS, NUM_SHARES, LikeliestFirst
from keepsight.sampling_params import SamplingParams

NEVER = float("-inf")
# With a larger `top_k`, the whole vocabulary is counted.
MAX_TOP_K = 1024
# For `top_k`, twice as many tokens and this many are examined: ties with the last one are kept, and bfloat16 has many.
SPARE = 64
# The number examined where only `top_p` limits them.
NUM_EXAMINED_FOR_TOP_P = 256
# A whole vocabulary is summed in blocks of this size first: a running sum of all tokens is ten times as much to write.
BLOCK = 512

Draw = Callable[[Tensor, Sequence[SamplingParams], Tensor], Tensor]


def draw_tokens(logits: Tensor, params: Sequence[SamplingParams], points: Sequence[float]) -> Tensor:
    """Draw a token id from each row of `logits` [rows, vocabulary].

    `points`, in [0, 1): where in the cumulative distribution each row's token lies.
    """
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
    """Select rows, given once each and in order; without a copy if they are all."""
    return values if len(rows) == len(values) else values[rows]


def _draw_of(params: SamplingParams, vocab_size: int) -> Draw:
    if params.top_k == 0 and params.top_p == 1:
        return _draw_of_all
    return _draw_of_likeliest if 0 < num_examined(params) < vocab_size else _draw_in_order


def num_examined(params: SamplingParams) -> int:
    """Return how many of the likeliest tokens to examine; 0 if the whole vocabulary is needed."""
    if params.top_k == 0:
        # Which of the other tokens min-p leaves is not known without them.
        return 0 if params.min_p else NUM_EXAMINED_FOR_TOP_P
    return 2 * params.top_k + SPARE if params.top_k <= MAX_TOP_K else 0


def _draw_of_all(scaled: Tensor, params: Sequence[SamplingParams], fractions: Tensor) -> Tensor:
    return _pick(_rule_out_unlikely(scaled, params).softmax(dim=-1), fractions)[:, 0]


def _draw_of_likeliest(scaled: Tensor, params: Sequence[SamplingParams], fractions: Tensor) -> Tensor:
    """Draw from the likeliest tokens where these are enough, else from all. All rows have the same `top_k`."""
    values, ids = find_likeliest(scaled, num_examined(params[0]))
    filtered, has_more = filter_likeliest(values, ids, scaled, params)
    drawn = ids.gather(1, _pick(filtered.softmax(dim=-1), fractions))[:, 0]
    if rows := has_more.nonzero()[:, 0].tolist():
        drawn[rows] = _draw_in_order(take_rows(scaled, rows), [params[row] for row in rows], take_rows(fractions, rows))
    return drawn


def _draw_in_order(scaled: Tensor, params: Sequence[SamplingParams], fractions: Tensor) -> Tensor:
    """Draw by counting the whole vocabulary. All rows have the same `top_k`."""
    drawn = list[Tensor]()
    for first in range(0, len(scaled), MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        order, kept = keep_in_order(scaled[some], params[some])
        # However the product is rounded, a fraction below 1 of the shares is less than all of them.
        ids, _ = order.find((kept * fractions[some]).long())
        drawn.append(ids)
    return torch.cat(drawn)


def keep_in_order(scaled: Tensor, params: Sequence[SamplingParams]) -> tuple[LikeliestFirst, Tensor]:
    """Return the tokens in order, and how many of the leading shares each row keeps [rows, 1].

    All rows have the same `top_k`.
    """
    values = _rule_out_unlikely(scaled, params)
    if top_k := params[0].top_k:
        last = scaled.topk(min(top_k, scaled.shape[1]), sorted=False).values.amin(dim=-1, keepdim=True)
        values = values.masked_fill(values < last, NEVER)
    order = LikeliestFirst(values)
    if all(each.top_p == 1 for each in params):
        return order, order.all_shares
    # The last token kept is the last for which more than `least` shares lie between its beginning and the end.
    least = (_column(_least_of_rest(params), values) * NUM_SHARES).long()
    last_place = (order.all_shares - least - 1).clamp(min=0)
    _, kept = order.find(torch.minimum(last_place, order.all_shares - 1))
    return order, kept


def find_likeliest(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the `number` largest logits and their ids, likeliest first, equal ones by id.

    Which tokens equal to the last one are included is unspecified.
    """
    ids = logits.topk(number).indices.sort(dim=-1).values
    values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def filter_likeliest(
    values: Tensor, ids: Tensor, scaled: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, Tensor]:
    """Set ruled-out values to minus infinity. Return them, and flags of rows in which tokens beyond these might stay.

    A row is flagged, too, if tokens equal to its last might stay.
    """
    if top_k := params[0].top_k:
        last = values[:, top_k - 1, None]
        filtered = _rule_out_rest(_rule_out_unlikely(values, params).masked_fill(values < last, NEVER), params)
        return filtered, ((values[:, -1:] == last) & last.isfinite())[:, 0]
    # All other tokens are represented by one with their total probability, placed behind these for the top-p cut.
    likely = scaled.softmax(dim=-1).gather(1, ids)
    others = (1 - likely.sum(dim=-1, keepdim=True, dtype=torch.float64)).clamp(min=0)
    times_the_first = (others / likely[:, :1]).to(values.dtype)
    filtered = _rule_out_rest(torch.cat((values, values[:, :1] + times_the_first.log()), dim=1), params)
    kept = filtered[:, :-1]
    return kept, ((values == values[:, -1:]) & kept.isfinite()).any(dim=-1)


def _rule_out_rest(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top-p to values that are in order."""
    if all(each.top_p == 1 for each in params):
        return values
    # The probability of each token and all after it. Summed from the end, as small addends are lost in a large sum.
    rest = values.softmax(dim=-1).flip(-1).cumsum(dim=-1).flip(-1)
    # Rounded sums need not reach exactly 0 or 1, so the likeliest token is always kept, and a top-p of 1 must not cut.
    rest[:, 0] = 2
    return values.masked_fill(rest <= _column(_least_of_rest(params), values), NEVER)


def _rule_out_unlikely(values: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply min-p: set tokens less likely than that fraction of the likeliest one to minus infinity."""
    if all(each.min_p == 0 for each in params):
        return values
    likely = (values - values.amax(dim=-1, keepdim=True)).exp()
    return values.masked_fill(likely < _column([each.min_p for each in params], values), NEVER)


def _least_of_rest(params: Sequence[SamplingParams]) -> list[float]:
    """Return a threshold for each row: top-p keeps a token if it and all after it are more likely than this."""
    return [1 - each.top_p if each.top_p < 1 else -1 for each in params]


def _column(numbers: list[float], values: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=values.device)[:, None]


def _pick(likely: Tensor, fractions: Tensor) -> Tensor:
    """Return the index in each row [rows, 1] at which the running sum passes that fraction of the row's total.

    Finds the block first, then the index within it. However many tokens there are, each is drawn with its probability
    to a relative error of some 1e-7.
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
    """Return the index of the first sum above the goal: always one of a non-zero addend, however goals are rounded."""
    below_all = sums[:, -1:] * (1 - 2**-53)
    return (sums <= torch.minimum(goals, below_all)).sum(dim=-1, keepdim=True)
