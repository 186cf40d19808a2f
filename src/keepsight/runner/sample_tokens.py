"""Samples the next token of each sequence from logits, for any mix of requests in one batch.

Each sequence has its own random numbers, so its tokens do not depend on the rest of the batch. The order of the steps
is vLLM's: grammar, bans, bias, penalties, temperature, min-p, top-k, top-p, draw.
"""

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random

import numpy as np
import torch
from torch import Tensor

from keepsight.requests import TokenLogprob, TokenLogprobs
from keepsight.runner.ban_runs import RunBan
from keepsight.runner.draw_tokens import NEVER, draw_tokens, take_rows
from keepsight.runner.guide_tokens import Guide, GuideTime, forbid_tokens
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.step_plan import Fault, SampledToken

# Rows drawn, or read for log-probabilities, at once: a row of 262k tokens takes some 8 MB, and on a GPU 2 GiB are
# reserved for a whole step.
ROWS_AT_ONCE = 64


class SamplingState:
    """The sampler's state of one sequence: its parameters and its output so far."""

    def __init__(self, constraints: "TokenConstraints", choice: int, guide: Guide | None = None) -> None:
        """Initialize; all choices of a request share its `constraints`."""
        self.params, self.constraints, self.guide = constraints.params, constraints, guide
        self.output_counts: Counter[int] = Counter()
        self.num_tokens = 0
        # The last tokens, as far back as a banned run reaches.
        self.last_tokens = deque[int](maxlen=constraints.banned_runs.num_examined_tokens)
        # The source of random points; None if greedy.
        params = constraints.params
        self._points = None if params.greedy else _begin_points(params.seed, choice)
        self.is_penalized = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)

    def take_point(self) -> float:
        """Return where in the cumulative distribution the next token lies, in [0, 1)."""
        assert self._points is not None
        return self._points.random()

    @property
    def fault(self) -> Fault | None:
        """The reason, if any, why this sequence's tokens are void and it must fail."""
        return None if self.guide is None else self.guide.fault

    def edits_logits(self) -> bool:
        params = self.params
        bans = self.num_tokens < params.min_tokens or params.allowed_token_ids is not None
        return bool(self.guide or self.is_penalized or bans or self.constraints.banned_runs or params.logit_bias)

    def note(self, token_id: int) -> None:
        self.output_counts[token_id] += 1
        self.num_tokens += 1
        self.last_tokens.append(token_id)
        if self.guide is not None:
            self.guide.follow(token_id)


def _begin_points(seed: int | None, choice: int) -> Random:
    return Random() if seed is None else Random((seed + choice) % 2**64)


class TokenConstraints:
    """A request's demands on single tokens, and the time that following its grammar may take.

    Their tensors may be as large as the vocabulary, so they are made once for all choices.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        end_ids: frozenset[int],
        banned_runs: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self.params, self.banned_runs = params, RunBan(banned_runs)
        self._prompt = prompt
        # Banned before `min_tokens`; whether a token ends the answer is decided elsewhere.
        self._end_ids = params.ids_that_end(end_ids)
        self.guide_time = GuideTime()
        self._tensors: _ConstraintTensors | None = None

    def find_tensors(self, logits: Tensor) -> "_ConstraintTensors":
        if self._tensors is None:
            self._tensors = _ConstraintTensors(self.params, self._prompt, self._end_ids, logits)
        return self._tensors


class _ConstraintTensors:
    def __init__(self, params: SamplingParams, prompt: Sequence[int], end_ids: frozenset[int], logits: Tensor) -> None:
        # The prompt tokens to penalize.
        self.prompt = _ids(set(prompt) if params.repetition_penalty != 1 else (), logits)
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids, logits)
        self.ends = _ids(end_ids, logits) if params.min_tokens else None
        self.biased, self.biases = _ids_and_numbers(params.logit_bias or {}, logits)


def sample_tokens(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Sample a token from each row of `logits` [sequences, vocabulary] and note it in the row's state."""
    raw = logits.float()
    edited = _edit(raw, states)
    chosen = edited.argmax(dim=-1)
    rows = [row for row, state in enumerate(states) if not state.params.greedy]
    for some in _some_at_once(rows):
        params, points = [states[row].params for row in some], [states[row].take_point() for row in some]
        chosen[some] = draw_tokens(take_rows(edited, some), params, points)
    token_ids = chosen.tolist()
    for token_id, state in zip(token_ids, states, strict=True):
        state.note(token_id)
    logprobs = _logprobs(raw, token_ids, states)
    return [SampledToken(*pair) for pair in zip(token_ids, logprobs, strict=True)]


def _some_at_once(rows: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[first : first + ROWS_AT_ONCE]


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
    params, constraints = state.params, state.constraints
    tensors = constraints.find_tensors(logits)
    if tensors.allowed is not None:
        _allow_only(tensors.allowed, logits)
    if tensors.ends is not None and state.num_tokens < params.min_tokens:
        _ban(tensors.ends, logits)
    if banned := constraints.banned_runs.tokens_after(tuple(state.last_tokens)):
        _ban(_ids(banned, logits), logits)
    if params.logit_bias:
        logits[tensors.biased] += tensors.biases
    if state.is_penalized:
        _penalize(logits, state, tensors.prompt)


def _penalize(logits: Tensor, state: SamplingState, prompt: Tensor) -> None:
    """Apply the penalties; `prompt` holds the prompt's distinct tokens."""
    params = state.params
    output, counts = _ids_and_numbers(state.output_counts, logits)
    if params.repetition_penalty != 1:
        # Tokens in both are written twice, with the same value.
        seen = torch.cat((prompt, output))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        logits[output] -= params.presence_penalty + params.frequency_penalty * counts


def _ban(banned: Tensor, logits: Tensor) -> None:
    """Ban tokens, unless none would be left: when a grammar is complete, only an end token is allowed."""
    before = logits[banned]
    logits.index_fill_(0, banned, NEVER)
    is_anything_left = logits.amax() > NEVER
    logits.index_copy_(0, banned, before.masked_fill(is_anything_left, NEVER))


def _allow_only(allowed: Tensor, logits: Tensor) -> None:
    """Ban all other tokens, likewise unless none would be left."""
    left = torch.full_like(logits, NEVER).index_copy_(0, allowed, logits[allowed])
    logits.copy_(torch.where(left.amax() > NEVER, left, logits))


def _ids(token_ids: Collection[int], logits: Tensor) -> Tensor:
    """Return the ids within the vocabulary; filtered on the host, as reading from the device would wait for it."""
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    return torch.from_numpy(ids[ids < len(logits)]).to(logits.device)


def _ids_and_numbers(numbers: Mapping[int, float], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids within the vocabulary, and the number of each."""
    ids = np.fromiter(numbers, np.int64, len(numbers))
    values, are_inside = np.fromiter(numbers.values(), np.float32, len(numbers)), ids < len(logits)
    inside = torch.from_numpy(ids[are_inside]), torch.from_numpy(values[are_inside])
    return inside[0].to(logits.device), inside[1].to(logits.device)


def _logprobs(raw: Tensor, token_ids: Sequence[int], states: Sequence[SamplingState]) -> list[TokenLogprobs | None]:
    """Return log-probabilities by the model's unedited logits, as OpenAI and vLLM report them."""
    results: list[TokenLogprobs | None] = [None] * len(states)
    # Rows are grouped by how many they want: among equal values, a larger `topk` may put others first.
    rows_by_number = defaultdict[int, list[int]](list)
    for row, state in enumerate(states):
        if state.params.logprobs is not None:
            rows_by_number[state.params.logprobs].append(row)
    for num_top, rows in rows_by_number.items():
        for some in _some_at_once(rows):
            logprobs = list_logprobs(take_rows(raw, some), [token_ids[row] for row in some], num_top)
            for row, each in zip(some, logprobs, strict=True):
                results[row] = each
    return results


def list_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row's token and of the `num_top` likeliest in its place."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = _count_set(logprobs > own) + 1
    values, indices = logprobs.topk(min(num_top, logprobs.shape[-1]))
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), indices.tolist(), values.tolist(), strict=True)
    return [
        (TokenLogprob(token_id, logprob, rank), *map(TokenLogprob, best, best_logprobs, itertools.count(1)))
        for token_id, logprob, rank, best, best_logprobs in rows
    ]


def _count_set(flags: Tensor) -> Tensor:
    """Count the set flags of each row [rows, vocabulary].

    Adds eight at a time, as bytes of an int64, which 128 of them cannot overflow: torch's own sum takes fifty times as
    long, half the time of all log-probabilities.
    """
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[1] % 1024))
    sums = padded.view(torch.int64).view(len(flags), -1, 128).sum(dim=-1)
    return sums.view(torch.uint8).sum(dim=-1)
