"""The number of a folder's files and their bytes, for all processes that share it: in a file, changed under its lock.

Knows nothing of the files counted. Invariant: the lock dies with its holder, and the next holder after one that was
killed during a change counts anew before anything else.
"""

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from keepsight.ipc.record_lock import try_lock

# Bytes of all files, a mark, and the number of files.
_CONTENT = struct.Struct("<QBQ")
# The mark of settled counts. The mark is 0 during a change and in a new file, and 1 was written by a version that knew
# only the bytes.
_SETTLED = 2
# The lock is held for milliseconds: a process that holds it longer was stopped.
_PATIENCE_SECONDS = 2.0
# A thread that holds the lock for longer waits for a disk that may never return.
_CLOSING_SECONDS = 1.0


class Held(NamedTuple):
    num_bytes: int
    num_files: int

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Self:
        listed = list(sizes)
        return cls(sum(listed), len(listed))


class Ledger:
    """`held` is exact while the ledger is being changed; `known` is what this process last read or wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Guards the descriptor, whose file lock would not exclude other threads of this process.
        self._lock = threading.Lock()
        self._descriptor = -1
        self.is_read_only = False
        self.known = Held(0, 0)

    @property
    def is_open(self) -> bool:
        """False also if its file was removed: processes that make another file would know nothing of this one."""
        try:
            return os.fstat(self._descriptor).st_nlink > 0
        except OSError:  # it is closed, perhaps because another thread is reopening it
            return False

    def open(self, *, is_read_only: bool = False) -> None:
        """Open the file, or reopen it. If that fails, the ledger is closed.

        With `is_read_only` the file must exist, no change can begin, and `known` is what others wrote last.
        """
        with self._lock:
            self._close()
            writing = os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT
            descriptor = os.open(self._path, writing | os.O_NOFOLLOW, 0o600)
            try:
                if not is_read_only:
                    _allocate(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor, self.is_read_only = descriptor, is_read_only
            if is_read_only:
                self.known = self.held

    def close(self) -> None:
        """Close the file. If a change does not end, it stays open until the process ends: the change needs it."""
        if self._lock.acquire(timeout=_CLOSING_SECONDS):
            try:
                self._close()
            finally:
                self._lock.release()

    @contextmanager
    def changing(self, count_anew: Callable[[], object]) -> Iterator[None]:
        """Hold the lock for a change. Raises OSError if the lock cannot be had.

        `count_anew` must set `held`; it is called if a process died during a change.
        """
        with self._lock:
            if self._descriptor < 0:
                raise OSError(errno.EBADF, f"{self._path} is closed")
            if self.is_read_only:
                raise OSError(errno.EROFS, f"{self._path} can only be read")
            with try_lock(self._descriptor, 0, patience=_PATIENCE_SECONDS) as is_held:
                if not is_held:
                    raise TimeoutError(errno.ETIMEDOUT, f"another process holds {self._path}")
                held, was_settled = self._read()
                self._write(held, is_settled=False)
                if not was_settled:
                    count_anew()
                try:
                    yield
                finally:
                    self.known = self.held
                    self._write(self.known, is_settled=True)

    def read_again(self) -> None:
        """Note what others may have changed meanwhile. Raises OSError if the ledger is closed."""
        self.known = self.held

    @property
    def held(self) -> Held:
        return self._read()[0]

    @held.setter
    def held(self, held: Held) -> None:
        self._write(held, is_settled=False)

    def add_file(self, num_bytes: int) -> None:
        held = self.held
        self.held = Held(held.num_bytes + num_bytes, held.num_files + 1)

    def remove_file(self, num_bytes: int) -> None:
        held = self.held
        self.held = Held(max(0, held.num_bytes - num_bytes), max(0, held.num_files - 1))

    def _read(self) -> tuple[Held, bool]:
        content = os.pread(self._descriptor, _CONTENT.size, 0)
        # The file may have been truncated.
        num_bytes, mark, num_files = _CONTENT.unpack(content.ljust(_CONTENT.size, b"\0"))
        return Held(num_bytes, num_files), mark == _SETTLED

    def _write(self, held: Held, *, is_settled: bool) -> None:
        os.pwrite(self._descriptor, _CONTENT.pack(held.num_bytes, _SETTLED * is_settled, held.num_files), 0)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _allocate(descriptor: int) -> None:
    """Make room now, so that the file can be written when there is none left. Goes on if the system refuses to."""
    try:
        os.posix_fallocate(descriptor, 0, _CONTENT.size)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
