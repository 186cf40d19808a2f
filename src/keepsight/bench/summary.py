"""Summarizes a workload's answers: spreads of times, rates, and how much of the prompts was cached.

Spreads are in milliseconds. A value that no answer reports is None, never 0.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import numpy as np

from keepsight.bench.ask import Answer
from keepsight.bench.measure import Measurement


@final
@dataclass(frozen=True, slots=True)
class Spread:
    p50: float
    p95: float
    p99: float
    mean: float

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> "Spread | None":
        if not seconds:
            return None
        ms = [each * 1e3 for each in seconds]
        # Percentiles between two values are interpolated linearly.
        p50, p95, p99 = np.percentile(ms, (50, 95, 99)).tolist()
        return cls(p50, p95, p99, statistics.fmean(ms))


@dataclass(frozen=True, slots=True)
class Summary:
    num_requests: int
    num_errors: int
    first_error: str | None
    seconds: float
    first_token: Spread | None
    # The time between two consecutive tokens of one answer.
    gap: Spread | None
    whole: Spread | None
    requests_per_second: float
    tokens_per_second: float
    # The tokens of the median prompt, and the cached share of all prompts together.
    prompt_tokens: float | None
    cached_share: float | None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Summary":
        """Build a summary from its fields, as `asdict` returns them. Raise TypeError if one is not a number."""
        given = {name: fields[name] for name in ("first_token", "gap", "whole")}
        spreads = {name: None if each is None else Spread(**each) for name, each in given.items()}
        for values in (fields, *(each for each in given.values() if each is not None)):
            _check_numbers({name: each for name, each in values.items() if name not in {"first_error", *given}})
        return cls(**fields | spreads)


def _check_numbers(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float | None):
            raise TypeError(f"{name} is {value!r:.80}, not a number")


def summarize(measurement: Measurement) -> Summary:
    answers = [answer for answer in measurement.answers if answer.error is None]
    errors = [answer.error for answer in measurement.answers if answer.error is not None]
    counts = [answer.num_prompt_tokens for answer in answers if answer.num_prompt_tokens]
    gaps = [later - earlier for answer in answers for earlier, later in pairwise(answer.token_times)]
    return Summary(
        num_requests=len(measurement.answers),
        num_errors=len(errors),
        first_error=next(iter(errors), None),
        seconds=measurement.seconds,
        first_token=Spread.of_seconds([answer.token_times[0] for answer in answers]),
        gap=Spread.of_seconds(gaps),
        whole=Spread.of_seconds([answer.seconds for answer in answers]),
        requests_per_second=len(answers) / measurement.seconds,
        tokens_per_second=sum(answer.num_tokens for answer in answers) / measurement.seconds,
        prompt_tokens=statistics.median(counts) if counts else None,
        cached_share=_cached_share(answers),
    )


def _cached_share(answers: Sequence[Answer]) -> float | None:
    counts = [(each.num_cached_tokens, each.num_prompt_tokens) for each in answers]
    known = [(cached, total) for cached, total in counts if cached is not None and total]
    if not known:
        return None
    return sum(cached for cached, _ in known) / sum(total for _, total in known)
