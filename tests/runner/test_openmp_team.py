"""A thread's OpenMP team has the size that was set, ends when the thread rests, and is recreated when it computes."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from keepsight.runner import openmp_team
from keepsight.runner.openmp_team import dismiss_team, keeping_team_size, set_team_size
from tests.wait_until import wait_until

TASKS = Path("/proc/self/task")


needs_libgomp = pytest.mark.skipif(
    openmp_team._find_in_torch("omp_set_num_threads") is None, reason="this torch does not compute with libgomp"
)


@needs_libgomp
def test_a_team_is_gone_after_it_was_dismissed_and_computes_again() -> None:
    team_sizes: list[int] = []
    sums: list[float] = []

    def compute() -> None:
        before = set(TASKS.iterdir())
        sums.append(torch.ones(1000, 1000).mul(2).sum().item())
        others = set(TASKS.iterdir()) - before
        team_sizes.append(1 + len(others))
        dismiss_team()
        wait_until(lambda: others.isdisjoint(TASKS.iterdir()))  # the kernel removes them a bit later

    def compute_twice() -> None:
        set_team_size(3)
        compute()
        compute()

    thread = threading.Thread(target=compute_twice)
    thread.start()
    thread.join()
    assert sums == [2e6, 2e6]
    assert team_sizes == [3, 3]


def test_a_team_keeps_its_size_whatever_others_set_meanwhile() -> None:
    is_set, may_look, counts = threading.Event(), threading.Event(), list[int]()

    def set_and_look() -> None:
        set_team_size(1)
        is_set.set()
        may_look.wait()
        counts.append(torch.get_num_threads())

    thread = threading.Thread(target=set_and_look)
    thread.start()
    is_set.wait()
    with keeping_team_size():
        set_team_size(torch.get_num_threads() + 1)
        may_look.set()
        thread.join()
    assert counts == [1]


@needs_libgomp
def test_a_thread_that_is_started_later_computes_with_as_many_as_if_no_team_had_been_given_a_size() -> None:
    counts: list[int] = []

    def look() -> None:
        counts.append(torch.get_num_threads())
        set_team_size(counts[0] + 1)

    for _ in range(2):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert counts[0] == counts[1]


def test_a_team_size_set_within_is_restored_even_after_a_failure() -> None:
    before = torch.get_num_threads()
    with suppress(MemoryError), keeping_team_size():
        set_team_size(before + 1)
        raise MemoryError
    assert torch.get_num_threads() == before


def test_a_thread_without_a_team_has_none_to_dismiss() -> None:
    thread = threading.Thread(target=dismiss_team)
    thread.start()
    thread.join()


def test_without_libgomp_nothing_is_dismissed_and_torch_sets_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    openmp_team._find_in_torch.cache_clear()
    monkeypatch.setattr(torch, "__file__", "/nowhere/__init__.py")
    before = torch.get_num_threads()
    set_team_size(before + 1)
    assert torch.get_num_threads() == before + 1
    set_team_size(before)
    dismiss_team()
    assert openmp_team._find_in_torch("omp_set_num_threads") is None
    openmp_team._find_in_torch.cache_clear()


@needs_libgomp
def test_a_thread_count_set_in_torch_does_not_reach_products_of_another_team() -> None:
    """Once torch was given a number of threads, MKL keeps one for each thread."""
    counts: list[object] = []
    count_mkls = openmp_team._find_in_torch("MKL_Get_Max_Threads")
    if count_mkls is None:
        pytest.skip("this torch multiplies without MKL")

    def look() -> None:
        set_team_size(1)
        counts.append(count_mkls())  # type: ignore[call-arg]

    with keeping_team_size():
        torch.set_num_threads(torch.get_num_threads() + 1)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert counts == [1]
