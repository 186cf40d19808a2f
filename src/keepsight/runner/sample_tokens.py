"""From logits to the next token of each sequence, for any mix of requests in one batch.

Every sequence has random numbers of its own, so that its tokens do not depend on who shares the batch with it.  The
order of the steps is vLLM's: grammar, bans, bias, penalties, temperature, min-p, top-k, top-p, draw.
"""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence
from random import Random

import torch
from torch import Tensor

from keepsight.requests import TokenLogprob, TokenLogprobs
from keepsight.runner.ban_runs import RunBan
from keepsight.runner.draw_tokens import NEVER, draw_tokens, take_rows
from keepsight.runner.guide_tokens import Guide, forbid_tokens
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import Fault, SampledToken

# That draw: sorted, each of 262k tokens takes some 8 MB, and a GPU keeps 2 GiB for all that a step makes.
ROWS_AT_ONCE = 64


class SamplingState:
    """One sequence as the sampler sees it: what was asked for and what has been said so far."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_ids: frozenset[int],
        choice: int,
        guide: Guide | None = None,
        banned_runs: RunBan | None = None,
    ) -> None:
        self.params, self.guide = params, guide
        self._prompt = prompt
        self.banned_runs = banned_runs or RunBan(())
        # Not to be sampled before `min_tokens`; whether a token ends the answer is decided elsewhere.
        self.end_ids = params.ids_that_end(end_ids)
        self.output_counts: Counter[int] = Counter()
        self.num_tokens = 0
        # As far back as a banned run reaches.
        self.last_said = deque[int](maxlen=self.banned_runs.num_tokens_looked_at)
        self._wishes: _Wishes | None = None
        # Of those that draw.
        self._points = None if params.greedy else _begin_points(params.seed, choice)
        self.is_penalized = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)

    def take_point(self) -> float:
        """Where its next token lies among all that is likely, from 0 to below 1."""
        assert self._points is not None
        return self._points.random()

    def find_wishes(self, logits: Tensor) -> "_Wishes":
        if self._wishes is None:
            self._wishes = _Wishes(self.params, self._prompt, self.end_ids, logits)
        return self._wishes

    @property
    def fault(self) -> Fault | None:
        """Why no token of this sequence is worth anything any more."""
        return None if self.guide is None else self.guide.fault

    def edits_logits(self) -> bool:
        params = self.params
        bans = self.num_tokens < params.min_tokens or params.allowed_token_ids is not None
        return bool(self.guide or self.is_penalized or bans or self.banned_runs or params.logit_bias)

    def note(self, token_id: int) -> None:
        self.output_counts[token_id] += 1
        self.num_tokens += 1
        self.last_said.append(token_id)
        if self.guide is not None:
            self.guide.follow(token_id)


def _begin_points(seed: int | None, choice: int) -> Random:
    return Random() if seed is None else Random((seed + choice) % 2**64)


class _Wishes:
    """What was asked of single tokens, as tensors: made once, since it may be as much as the vocabulary has tokens."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], end_ids: frozenset[int], logits: Tensor) -> None:
        allowed, bias = params.allowed_token_ids, params.logit_bias or {}
        # What is to be penalized for standing there.
        self.prompt = _ids(set(prompt) if params.repetition_penalty != 1 else (), logits)
        self.forbidden = None if allowed is None else ~_are_in(allowed, logits)
        self.ends = _are_in(end_ids, logits) if params.min_tokens else None
        biased = _inside(bias, logits)
        self.biased = _ids(biased, logits)
        self.biases = torch.tensor([bias[each] for each in biased], dtype=logits.dtype).to(logits.device)


def sample_tokens(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """`logits` [sequences, vocabulary]; each state is told what was chosen for it."""
    raw = logits.float()
    edited = _edit(raw, states)
    chosen = edited.argmax(dim=-1)
    rows = [row for row, state in enumerate(states) if not state.params.greedy]
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        params, points = [states[row].params for row in some], [states[row].take_point() for row in some]
        chosen[some] = draw_tokens(take_rows(edited, some), params, points)
    token_ids = chosen.tolist()
    for token_id, state in zip(token_ids, states, strict=True):
        state.note(token_id)
    logprobs = _logprobs(raw, token_ids, states)
    return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]


def _edit(raw: Tensor, states: Sequence[SamplingState]) -> Tensor:
    rows = [row for row, state in enumerate(states) if state.edits_logits()]
    if not rows:
        return raw
    edited = raw.clone()
    forbid_tokens(edited, [state.guide for state in states])
    for row in rows:
        _edit_row(edited[row], states[row])
    return edited


def _edit_row(logits: Tensor, state: SamplingState) -> None:
    params, wishes = state.params, state.find_wishes(logits)
    if wishes.forbidden is not None:
        _ban(wishes.forbidden, logits)
    if wishes.ends is not None and state.num_tokens < params.min_tokens:
        _ban(wishes.ends, logits)
    if banned := state.banned_runs.tokens_after(tuple(state.last_said)):
        _ban(_are_in(banned, logits), logits)
    if params.logit_bias:
        logits[wishes.biased] += wishes.biases
    if state.is_penalized:
        _penalize(logits, state, wishes.prompt)


def _penalize(logits: Tensor, state: SamplingState, prompt: Tensor) -> None:
    """`prompt`: its tokens, each once."""
    params, said = state.params, _inside(state.output_counts, logits)
    said_ids = _ids(said, logits)
    if params.repetition_penalty != 1:
        # What stands in both is written twice, the same both times.
        seen = torch.cat((prompt, said_ids))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if said and (params.presence_penalty or params.frequency_penalty):
        counts = torch.tensor([state.output_counts[token_id] for token_id in said], device=logits.device)
        logits[said_ids] -= params.presence_penalty + params.frequency_penalty * counts


def _ban(banned: Tensor, logits: Tensor) -> None:
    """Unless nothing were left: where a grammar has come to its end, the end is all there is to say."""
    is_anything_left = (logits.isfinite() & ~banned).any()
    logits.masked_fill_(banned & is_anything_left, NEVER)


def _are_in(token_ids: Collection[int], logits: Tensor) -> Tensor:
    """For each token of the vocabulary."""
    return torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, _ids(token_ids, logits), True)


def _ids(token_ids: Collection[int], logits: Tensor) -> Tensor:
    return torch.tensor(_inside(token_ids, logits), dtype=torch.int64, device=logits.device)


def _inside(token_ids: Collection[int], logits: Tensor) -> list[int]:
    """Those that the vocabulary has, known here: to ask a device for one is to wait until it has come that far."""
    return sorted(token_id for token_id in token_ids if token_id < logits.shape[0])


def _logprobs(raw: Tensor, token_ids: Sequence[int], states: Sequence[SamplingState]) -> list[TokenLogprobs | None]:
    """Of the model itself, before anything was edited, as OpenAI and vLLM report them."""
    results: list[TokenLogprobs | None] = [None] * len(states)
    # Together only with those that want as many: of equals a larger choice may put others first.
    rows_by_number = defaultdict[int, list[int]](list)
    for row, state in enumerate(states):
        if state.params.logprobs is not None:
            rows_by_number[state.params.logprobs].append(row)
    for num_top, rows in rows_by_number.items():
        told = list_logprobs(raw[rows], [token_ids[row] for row in rows], num_top)
        for row, each in zip(rows, told, strict=True):
            results[row] = each
    return results


def list_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of each row's token, and of the `num_top` likeliest in its place."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, indices = logprobs.topk(min(num_top, logprobs.shape[-1]))
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), indices.tolist(), values.tolist(), strict=True)
    return [
        (TokenLogprob(token_id, logprob, rank), *map(TokenLogprob, best, best_logprobs, itertools.count(1)))
        for token_id, logprob, rank, best, best_logprobs in rows
    ]
