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
    if torch.get_num_threads() != count and (set_number := _find_in_torch("omp_set_num_threads")) is not None:
        set_number(count)
    # It has a number of its own wherever torch was told one.
    if (set_number := _find_in_torch("MKL_Set_Num_Threads_Local")) is not None:
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
    pause = _find_in_torch("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _find_in_torch(name: str) -> Callable[[int], object] | None:
    """Or in the libraries that it computes with: a program may have loaded others of the same names."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        function: Callable[[int], object] = getattr(library, name)
        return function
    return None
