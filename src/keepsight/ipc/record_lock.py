"""Locks on single bytes of a file, which exclude both threads and processes.

Each `os.open` is a holder of its own ("open file description" locks). Invariant: the kernel releases the locks of a
dead process, so no lock outlives its holder, and no file is left behind.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

# l_type, l_whence, l_start, l_len, l_pid of a struct flock.
_FLOCK = struct.Struct("hhqqixxxx")
# Most locks are held for microseconds. Polling that often for seconds would take part of a core from the holder.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.008


@contextmanager
def try_lock(descriptor: int, place: int, *, is_shared: bool = False, patience: float = 0) -> Iterator[bool]:
    """Yield whether the lock is held, after at most `patience` seconds: a stopped holder must not stop others."""
    is_held = _try_until(time.monotonic() + patience, descriptor, place, is_shared)
    try:
        yield is_held
    finally:
        if is_held:
            # Unlocked explicitly, rather than by closing: a forked child may have the file open too.
            _set(fcntl.F_UNLCK, descriptor, place)


def let_others_in() -> None:
    """Wait until all that want a lock have tried again: one that takes it again and again would keep it from them."""
    time.sleep(2 * _LONGEST_PAUSE_SECONDS)


@contextmanager
def opened(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_until(deadline: float, descriptor: int, place: int, is_shared: bool) -> bool:
    kind, pause = fcntl.F_RDLCK if is_shared else fcntl.F_WRLCK, _FIRST_PAUSE_SECONDS
    while True:
        try:
            _set(kind, descriptor, place)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _set(kind: int, descriptor: int, place: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0))
