"""Loads that a tier is too slow for do not wait for it; others do, and it is noticed when the tier becomes faster."""

import pytest

from keepsight.tiers.read_pace import TRIAL_SECONDS, ReadPace
from tests.clock import Clock

SLOW, FAST, PATIENCE = 0.3, 0.002, 0.2


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(clock: Clock) -> ReadPace:
    return ReadPace("remote tier of embeddings", clock)


def note(pace: ReadPace, *durations: float) -> None:
    for seconds in durations:
        pace.note(seconds)


def test_a_tier_is_asked_until_it_is_known_to_be_slow(pace: ReadPace) -> None:
    for _ in range(4):
        assert pace.is_enough(PATIENCE)
        pace.note(SLOW)
    assert not pace.is_enough(PATIENCE)


def test_more_patient_loads_still_ask_a_slow_tier(pace: ReadPace) -> None:
    note(pace, *[SLOW] * 100)
    assert pace.is_enough(SLOW)
    assert pace.is_enough(10)


def test_a_fast_tier_is_asked_though_some_of_its_reads_are_slow(pace: ReadPace) -> None:
    for _ in range(20):
        note(pace, FAST, SLOW, SLOW, SLOW)
        assert pace.is_enough(PATIENCE)


def test_a_tier_is_asked_again_after_one_fast_read(pace: ReadPace) -> None:
    note(pace, *[SLOW] * 100, FAST)
    assert pace.is_enough(PATIENCE)


def test_a_slow_tier_is_tried_now_and_then(pace: ReadPace, clock: Clock) -> None:
    note(pace, *[SLOW] * 4)
    for _ in range(3):
        assert pace.is_trial_due()
        assert not pace.is_trial_due()
        clock.now += TRIAL_SECONDS - 0.01
        assert not pace.is_trial_due()
        clock.now += 0.01


def test_that_a_tier_is_slow_is_logged_once(pace: ReadPace, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        note(pace, FAST, *[SLOW] * 4)
        pace.is_trial_due()
        clock.now += TRIAL_SECONDS
    assert caplog.messages == [
        "the remote tier of embeddings takes 0.3 s: it is not asked for what is recomputed faster"
    ]
