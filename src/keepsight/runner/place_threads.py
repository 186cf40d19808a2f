"""On which cores the threads of one team compute, as long as they compute.

Linux may wake a thread on the core of the one that waits for it, and leave both there for ten milliseconds; a virtual
machine's may even try to.  Only a team, or two, of as many threads as there are cores is told apart, so that nobody is
kept from a core that rests.
"""

import os
import threading
from collections.abc import Sequence
from ctypes import Structure, c_long, c_void_p
from typing import Final

import torch

from keepsight.models.cpu_library import call, has_library


class _Places(Structure):
    _fields_ = (("cores", c_void_p), ("count", c_long))


def cores_of_process() -> Sequence[int]:
    """Empty where threads cannot be told where to compute."""
    if not has_library() or not hasattr(os, "sched_getaffinity"):
        return ()
    return sorted(os.sched_getaffinity(os.getpid()))


class Places(threading.local):
    """Those of the thread that asks and of the team that it computes with."""

    def __init__(self, all_cores: Sequence[int]) -> None:
        self._all: Final = all_cores
        self._taken: Sequence[int] = ()

    def take(self, cores: Sequence[int]) -> None:
        """One for each thread of the team, which has as many."""
        if cores == self._taken:
            return
        numbers = torch.tensor(cores, dtype=torch.int64)
        call("place_team", _Places(numbers.data_ptr(), len(cores)))
        self._taken = cores

    def leave(self) -> None:
        """The thread that asks; what is left of its team sleeps."""
        if self._taken:
            os.sched_setaffinity(0, self._all)
            self._taken = ()
