"""Silence is counted in looks, and a look that comes late counts no more than one that comes in time."""

import pytest

from keepsight.silence import LOOK_SECONDS, SILENT_SECONDS, Silence
from tests.clock import Clock

ENOUGH_LOOKS = round(SILENT_SECONDS / LOOK_SECONDS)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def silence(clock: Clock) -> Silence:
    return Silence(clock)


def look(silence: Silence, clock: Clock, seconds: float, times: int = 1) -> list[bool]:
    """Return what looks say, each so long after the one before."""
    said = []
    for _ in range(times):
        clock.now += seconds
        said.append(silence.look())
    return said


def test_a_silence_becomes_long_once(silence: Silence, clock: Clock) -> None:
    assert look(silence, clock, LOOK_SECONDS, ENOUGH_LOOKS + 2) == [False] * (ENOUGH_LOOKS - 1) + [True, False, False]
    assert silence.is_long
    assert silence.seconds == SILENT_SECONDS + 2 * LOOK_SECONDS


def test_a_sign_of_life_ends_it_and_the_next_one_begins_anew(silence: Silence, clock: Clock) -> None:
    for _ in range(2):
        assert look(silence, clock, LOOK_SECONDS, ENOUGH_LOOKS)[-1]
        assert silence.end()
        assert (silence.is_long, silence.seconds) == (False, 0.0)
    assert not silence.end()


def test_signs_of_life_shortly_before_it_becomes_long_prevent_that(silence: Silence, clock: Clock) -> None:
    for _ in range(3):
        assert not any(look(silence, clock, LOOK_SECONDS, ENOUGH_LOOKS - 1))
        clock.now += LOOK_SECONDS  # not looked at: it is the time before the sign
        assert not silence.end()


def test_frequent_looks_do_not_make_it_longer(silence: Silence, clock: Clock) -> None:
    assert not any(look(silence, clock, SILENT_SECONDS / 128, 127))
    assert look(silence, clock, SILENT_SECONDS / 128) == [True]


def test_a_night_without_looks_counts_as_one(silence: Silence, clock: Clock) -> None:
    """As when the machine slept: the other process could give no sign of life either."""
    assert look(silence, clock, 8 * 3600, ENOUGH_LOOKS - 1) == [False] * (ENOUGH_LOOKS - 1)
    assert look(silence, clock, LOOK_SECONDS) == [True]
