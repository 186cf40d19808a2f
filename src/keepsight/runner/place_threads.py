"""Pins the threads of a team to cores, for as long as they compute.

Linux may wake a thread on the core of the one that waits for it, and leave both there for ten milliseconds; a virtual
machine's may even try to. Threads are pinned only if one team, or two together, have as many threads as there are
cores, so that no thread is kept from an idle core.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from ctypes import Structure, c_long, c_void_p
from typing import Final

import torch

from keepsight.count_cores import list_cores
from keepsight.models.cpu_library import call, has_library


class _Places(Structure):
    _fields_ = (("cores", c_void_p), ("count", c_long))


def cores_of_process() -> Sequence[int]:
    """Return the process's cores, sorted; empty if threads cannot be pinned."""
    return list_cores() if has_library() else ()


class Places(threading.local):
    """The cores of the calling thread and its team (thread-local)."""

    def __init__(self, all_cores: Sequence[int]) -> None:
        self._all: Final = all_cores
        self._taken: Sequence[int] = ()

    def take(self, cores: Sequence[int]) -> None:
        """Pin the team's threads, one to each of `cores`."""
        if cores == self._taken:
            return
        numbers = torch.tensor(cores, dtype=torch.int64)
        call("place_team", _Places(numbers.data_ptr(), len(cores)))
        self._taken = cores

    def leave(self) -> None:
        """Unpin the calling thread; the rest of its team sleeps."""
        if self._taken:
            # The system may refuse it, or these cores may have been taken from the process: it stays where it is.
            with suppress(OSError):
                os.sched_setaffinity(0, self._all)
            self._taken = ()
