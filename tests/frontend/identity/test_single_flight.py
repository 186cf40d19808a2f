"""Concurrent callers share one computation, known results need none, and each caller gets its own error."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.identity import single_flight
from keepsight.frontend.identity.known_media import KnownMedia
from keepsight.frontend.identity.single_flight import SingleFlight
from keepsight.media import Geometry

LENGTH = Geometry(num_samples=8_000)


def make_single_flight() -> SingleFlight[str, Geometry]:
    known = KnownMedia()
    return SingleFlight(known.recall_content, known.learn_content)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the callers that have begun to wait for another's look."""
    waiting, wait_for = threading.Semaphore(0), single_flight._wait_for

    def count_and_wait(*arguments: Any) -> Any:
        waiting.release()
        return wait_for(*arguments)

    monkeypatch.setattr(single_flight, "_wait_for", count_and_wait)
    return waiting


def ask_at_once(
    looks: SingleFlight[str, Geometry], waiting: threading.Semaphore, look: Callable[[], Geometry]
) -> list[Geometry | Exception | None]:
    """Make four concurrent calls; the first computes until the others wait for it."""
    is_looking = threading.Event()

    def wait_and_look() -> Geometry:
        is_looking.set()
        assert all(waiting.acquire(timeout=20) for _ in range(3))
        return look()

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(looks.get_or_compute, "a sound", "first", wait_and_look)]
        assert is_looking.wait(20)
        asked += [threads.submit(looks.get_or_compute, "a sound", f"later {each}", wait_and_look) for each in range(3)]
        return [each.exception() or each.result() for each in asked]  # type: ignore[misc]


def test_concurrent_and_later_calls_share_one_computation(waiting: threading.Semaphore) -> None:
    looked: list[int] = []

    def look() -> Geometry:
        looked.append(1)
        return LENGTH

    looks = make_single_flight()
    assert ask_at_once(looks, waiting, look) == [LENGTH] * 4
    assert looks.get_or_compute("a sound", "last", look) == LENGTH
    assert looked == [1]
    assert looks.knows("a sound")
    assert not looks.knows("another")
    looks.get_or_compute("another", "last", look)
    assert looked == [1, 1]


def test_each_caller_gets_a_refusal_with_its_own_field_and_later_calls_try_again(waiting: threading.Semaphore) -> None:
    def refuse() -> Geometry:
        raise UnreadablePictureError("first", "is no sound")

    looks = make_single_flight()
    errors = ask_at_once(looks, waiting, refuse)
    assert [str(each) for each in errors] == [
        f"{name}: is no sound" for name in ("first", "later 0", "later 1", "later 2")
    ]
    assert looks.get_or_compute("a sound", "last", lambda: LENGTH) == LENGTH


def test_other_failures_are_raised_for_all_as_separate_objects(waiting: threading.Semaphore) -> None:
    def fail() -> Geometry:
        raise OSError("no memory")

    errors = ask_at_once(make_single_flight(), waiting, fail)
    assert [str(each) for each in errors] == ["no memory"] * 4
    with pytest.raises(OSError, match="no memory"):
        raise errors[1]  # type: ignore[misc]
    assert len({id(each) for each in errors}) == 4


def test_calls_that_access_what_is_known_never_overlap() -> None:
    accessed: list[str] = []

    def note(access: str) -> Geometry | None:
        assert looks._lock.locked(), access
        accessed.append(access)
        return None

    looks = SingleFlight[str, Geometry](lambda key: note("recall"), lambda key, found: note("learn"))
    assert not looks.knows("a sound")
    assert looks.get_or_compute("a sound", "first", lambda: LENGTH) == LENGTH
    assert accessed == ["recall", "recall", "learn"]
