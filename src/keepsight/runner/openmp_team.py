"""Sets the size of the calling thread's OpenMP team, and releases the team when there is nothing to compute.

As long as all teams together have no more threads than there are cores, libgomp's threads spin while they wait for the
next piece of work; otherwise they sleep in between, and an idle team counts like a busy one. With the encoder's team
idle, each step of the answers took a quarter longer.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: settings are kept


def set_team_size(count: int) -> None:
    """Set the team size of the calling thread alone: not of other threads, nor of those that are started later."""
    # Always call get_num_threads first: when a thread first calls it or computes, it gets the number that torch was
    # last told on any thread.
    if torch.get_num_threads() != count and (set_number := _find_in_torch("omp_set_num_threads")) is not None:
        set_number(count)
    # MKL has a setting of its own once torch was told a number.
    if (set_number := _find_in_torch("MKL_Set_Num_Threads_Local")) is not None:
        set_number(count)
    # If torch uses another library, only torch can set its size, which also applies to threads started later.
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@contextmanager
def keeping_team_size() -> Iterator[None]:
    """Restore the calling thread's team size at the end, as the thread may belong to the caller."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        set_team_size(before)


def dismiss_team() -> None:
    """Release the calling thread's team; its next computation makes a new one, in a tenth of a millisecond."""
    pause = _find_in_torch("omp_pause_resource_all")
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _find_in_torch(name: str) -> Callable[[int], object] | None:
    """Find a function in torch or the libraries it links to, as the process may have loaded others of the same name."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        function: Callable[[int], object] = getattr(library, name)
        return function
    return None
