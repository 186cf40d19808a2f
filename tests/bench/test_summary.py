from dataclasses import asdict

import pytest

from keepsight.bench.ask import Answer
from keepsight.bench.measure import Measurement
from keepsight.bench.summary import Spread, Summary, summarize

GOOD = Answer(0.4, [0.1, 0.2, 0.4], "abc", 3, 100, 80)
LATE = Answer(0.6, [0.3, 0.6], "ab", 2, 100, 0)
BROKEN = Answer(9.0, error="500: no")


def test_percentiles_lie_between_the_values() -> None:
    assert Spread.of_seconds([5]) == Spread(5000, 5000, 5000, 5000)
    spread = Spread.of_seconds([4, 0, 2, 3, 1])
    assert spread is not None
    assert (spread.p50, spread.p95) == pytest.approx((2000, 3800))


def test_times_and_rates_count_only_successful_answers() -> None:
    summary = summarize(Measurement([GOOD, BROKEN, LATE], 2.0))
    assert summary.first_token is not None
    assert summary.gap is not None
    spread = summary.first_token
    assert (spread.p50, spread.p95, spread.mean) == pytest.approx((200, 290, 200))
    assert summary.gap.p50 == pytest.approx(200)
    assert (summary.requests_per_second, summary.tokens_per_second) == (1.0, 2.5)
    assert (summary.num_requests, summary.num_errors, summary.first_error) == (3, 1, "500: no")
    assert (summary.prompt_tokens, summary.cached_share) == (100, 0.4)


def test_values_that_no_answer_reported_are_none_not_zero() -> None:
    summary = summarize(Measurement([Answer(0.1, [0.1], "a", 1)], 1.0))
    assert (summary.cached_share, summary.prompt_tokens, summary.gap) == (None, None, None)


def test_a_server_that_only_fails_has_no_times() -> None:
    summary = summarize(Measurement([BROKEN], 1.0))
    assert (summary.first_token, summary.requests_per_second) == (None, 0.0)


def test_a_summary_survives_json() -> None:
    for answers in ([GOOD, LATE], [BROKEN]):
        summary = summarize(Measurement(answers, 2.0))
        assert Summary.from_json(asdict(summary)) == summary
