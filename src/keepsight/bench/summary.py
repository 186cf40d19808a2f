"""What a workload's answers amount to: spreads of times, rates, and how much of the prompts was cached.

Times are in milliseconds.  What no answer tells is None, never 0.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from keepsight.bench.ask import Answer
from keepsight.bench.measure import Measurement


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
        ms = sorted(each * 1e3 for each in seconds)
        return cls(percentile(ms, 50), percentile(ms, 95), percentile(ms, 99), statistics.fmean(ms))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between two values, by the straight line between them."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Summary:
    num_requests: int
    num_errors: int
    first_error: str | None
    seconds: float
    first_token: Spread | None
    # Between two tokens of one answer.
    gap: Spread | None
    whole: Spread | None
    requests_per_second: float
    tokens_per_second: float
    # Of the median prompt, and of all prompts together.
    prompt_tokens: float | None
    cached_share: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Summary":
        spreads = {name: fields[name] and Spread(**fields[name]) for name in ("first_token", "gap", "whole")}
        return cls(**fields | spreads)


def summarize(measurement: Measurement) -> Summary:
    answers = [answer for answer in measurement.answers if answer.error is None]
    errors = [answer.error for answer in measurement.answers if answer.error is not None]
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
        prompt_tokens=statistics.median(counts) if (counts := _known_counts(answers)) else None,
        cached_share=_cached_share(answers),
    )


def _known_counts(answers: Sequence[Answer]) -> list[int]:
    return [answer.num_prompt_tokens for answer in answers if answer.num_prompt_tokens]


def _cached_share(answers: Sequence[Answer]) -> float | None:
    counts = [(each.num_cached_tokens, each.num_prompt_tokens) for each in answers]
    said = [(cached, total) for cached, total in counts if cached is not None and total]
    if not said:
        return None
    return sum(cached for cached, _ in said) / sum(total for _, total in said)
