"""The OpenMP threads that a thread computes with: how many they are, and that they go home when there is nothing to do.

As long as all teams together have no more threads than there are cores, libgomp's threads wait for the next piece of
work awake; else they sleep between any two, and a team that rests counts like one that works.  With the team of
encodings at rest, each step of the answers took a quarter longer.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: what was set stays set


def set_team_size(count: int) -> None:
    """Of the calling thread alone: not of its process's other threads, nor of those that are started later."""
    # Asking comes first even where the answer is known: a thread that has not yet asked is given, whenever it first
    # does or computes, the number that torch was told last, on whichever thread.
    if torch.get_num_threads() == count:
        return
    set_number = _find_in_libgomp("omp_set_num_threads")
    if set_number is not None:
        set_number(count)
    # Where torch computes with another library, which only torch can tell; and it tells the threads that come, too.
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextmanager
def keeping_team_size() -> Iterator[None]:
    """The calling thread may be the caller's own: what is set on it meanwhile is undone."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        set_team_size(before)


def dismiss_team() -> None:
    """That of the calling thread; the next that it computes makes one anew, in a tenth of a millisecond."""
    pause = _find_in_libgomp("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _find_in_libgomp(name: str) -> Callable[[int], object] | None:
    """Of the one that torch has loaded, if that is what it computes with."""
    with suppress(OSError, AttributeError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "libgomp" in (path := line.rpartition(" ")[2]):
                function: Callable[[int], object] = getattr(ctypes.CDLL(path), name)
                return function
    return None
