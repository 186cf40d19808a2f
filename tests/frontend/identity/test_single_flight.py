"""Concurrent callers share one computation, known results need none, and each caller gets its own error."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.frontend.identity.single_flight import SingleFlight
from keepsight.media import Geometry

LENGTH = Geometry(num_samples=8_000)


def single_flight() -> SingleFlight[str, Geometry]:
    known = KnownMedia()
    return SingleFlight(known.recall_content, known.learn_content)


def ask_at_once(looks: SingleFlight[str, Geometry], look: Callable[[], Geometry]) -> list[Geometry | Exception | None]:
    """Make four concurrent calls; the first computes until the others have arrived."""
    is_looking, have_come = threading.Event(), threading.Event()

    def wait_and_look() -> Geometry:
        is_looking.set()
        assert have_come.wait(10)
        return look()

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(looks.get_or_compute, "a sound", "first", wait_and_look)]
        assert is_looking.wait(10)
        asked += [threads.submit(looks.get_or_compute, "a sound", f"later {each}", wait_and_look) for each in range(3)]
        time.sleep(0.05)  # If they are late, they find it known.
        have_come.set()
        return [each.exception() or each.result() for each in asked]  # type: ignore[misc]


def test_concurrent_and_later_calls_share_one_computation() -> None:
    looked: list[int] = []

    def look() -> Geometry:
        looked.append(1)
        return LENGTH

    looks = single_flight()
    assert ask_at_once(looks, look) == [LENGTH] * 4
    assert looks.get_or_compute("a sound", "last", look) == LENGTH
    assert looked == [1]
    looks.get_or_compute("another", "last", look)
    assert looked == [1, 1]


def test_each_caller_gets_a_refusal_with_its_own_field_and_later_calls_try_again() -> None:
    def refuse() -> Geometry:
        raise UnreadablePictureError("first", "is no sound")

    looks = single_flight()
    errors = ask_at_once(looks, refuse)
    assert [str(each) for each in errors] == [
        f"{name}: is no sound" for name in ("first", "later 0", "later 1", "later 2")
    ]
    assert looks.get_or_compute("a sound", "last", lambda: LENGTH) == LENGTH


def test_other_failures_are_raised_for_all_as_separate_objects() -> None:
    def fail() -> Geometry:
        raise OSError("no memory")

    errors = ask_at_once(single_flight(), fail)
    assert [str(each) for each in errors] == ["no memory"] * 4
    with pytest.raises(OSError, match="no memory"):
        raise errors[1]  # type: ignore[misc]
    assert len({id(each) for each in errors}) == 4
