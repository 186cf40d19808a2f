"""Threads that compute together are placed on cores of their own, and leave them when they rest."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from keepsight.runner.openmp_team import set_team_size
from keepsight.runner.place_threads import Places, cores_of_process
from keepsight.runner.share_device import CpuShare

CORES = cores_of_process()
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="there is one core, or threads cannot be told where to compute")


def on_another_thread(look: Callable[[], None]) -> None:
    """Run on another thread, so that the test's own thread is unchanged."""
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()


def cores_of_threads() -> list[set[int]]:
    found = []
    for path in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found.append(os.sched_getaffinity(int(path.name)))
    return found


def test_each_thread_of_a_team_has_a_core_of_its_own_until_it_leaves() -> None:
    def look() -> None:
        set_team_size(2)
        places = Places(CORES)
        places.take(CORES[:2])
        placed = [cores for cores in cores_of_threads() if len(cores) == 1]
        assert sorted(placed, key=min) == [{core} for core in CORES[:2]]
        places.leave()
        assert os.sched_getaffinity(0) == set(CORES)

    on_another_thread(look)


def test_a_thread_that_the_system_lets_leave_no_core_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: int, _cores: object) -> None:
        raise PermissionError("Operation not permitted")

    def look() -> None:
        set_team_size(1)
        places = Places(CORES)
        places.take(CORES[1:2])
        places.leave()
        left.append(os.sched_getaffinity(0))

    left = list[set[int]]()
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    on_another_thread(look)
    assert left == [{CORES[1]}]


def test_a_thread_that_has_a_place_keeps_it_and_others_have_none() -> None:
    def look() -> None:
        set_team_size(1)
        places = Places(CORES)
        places.take(CORES[1:2])
        places.take(CORES[1:2])
        assert os.sched_getaffinity(0) == {CORES[1]}
        on_another_thread(places.leave)
        assert os.sched_getaffinity(0) == {CORES[1]}
        places.leave()

    on_another_thread(look)


def places_in_step(share: CpuShare, num_tokens: int, *, beside_works: bool) -> set[int]:
    found: list[set[int]] = []

    def look() -> None:
        with share.foreground(num_tokens, beside_works=beside_works):
            found.append(os.sched_getaffinity(0))
        share.before_rest()
        assert os.sched_getaffinity(0) == set(CORES)

    on_another_thread(look)
    return found[0]


def test_a_step_of_all_cores_has_places_and_one_of_few_tokens_may_compute_anywhere() -> None:
    share = CpuShare(len(CORES), 0.5, max_tokens_alone=3)
    assert len(places_in_step(share, 4, beside_works=False)) == 1
    assert places_in_step(share, 3, beside_works=False) == set(CORES)


def test_work_beside_answers_runs_on_other_cores() -> None:
    share, beside = CpuShare(len(CORES), 0.5, max_tokens_alone=3), set[int]()
    in_step, looked = threading.Event(), threading.Event()

    def encode() -> None:
        in_step.wait(10)
        share.before_part()
        beside.update(os.sched_getaffinity(0))
        looked.set()
        share.before_rest()

    thread = threading.Thread(target=encode)
    thread.start()
    with share.foreground(3, beside_works=True):
        own = os.sched_getaffinity(0)
        in_step.set()
        assert looked.wait(10)
    share.before_rest()
    thread.join()
    assert len(own) == len(beside) == 1
    assert own != beside


def test_a_team_smaller_than_the_machine_may_compute_anywhere() -> None:
    """Another program's team may have the same size, and both would get the same cores."""
    share = CpuShare(len(CORES) + 1, 0.5)
    assert places_in_step(share, 4, beside_works=False) == set(CORES)
