"""How many files a folder has and their bytes, for all processes that share it: in a file, changed under its lock.

Knows none of these files.  Invariant: the lock dies with its holder, and who comes after one that was killed while it
changed something counts anew before anything else.
"""

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from keepsight.ipc.record_lock import try_lock

# Bytes of all files, whether that is settled, and how many files they are.
_CONTENT = struct.Struct("<QBQ")
# Not while somebody changes it, nor in a file of zeros, nor where 1 tells of a version that knew only the bytes.
_SETTLED = 2
# It is locked for milliseconds: whoever holds it longer was stopped.
_PATIENCE_SECONDS = 2.0


class Held(NamedTuple):
    num_bytes: int
    num_files: int


class Ledger:
    """`held` is true while it is being changed, `known` was when this process had changed it last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Over the descriptor: threads of one process would share its lock.
        self._lock = threading.Lock()
        self._descriptor = -1
        self.known = Held(0, 0)

    @property
    def is_open(self) -> bool:
        """Not if its file was removed: whoever makes another one knows nothing of this."""
        try:
            return os.fstat(self._descriptor).st_nlink > 0
        except OSError:  # it is closed, maybe as another thread opens it anew
            return False

    def open(self) -> None:
        """Anew, if it is open; if that fails, it is closed."""
        with self._lock:
            self._close()
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                # Or it could not be written when there is no room left.
                os.posix_fallocate(descriptor, 0, _CONTENT.size)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor

    def close(self) -> None:
        with self._lock:
            self._close()

    @contextmanager
    def changing(self, count_anew: Callable[[], object]) -> Iterator[None]:
        """`count_anew` sets `held`, if a dead one left something undone.  Raises OSError if it cannot be had."""
        with self._lock:
            if self._descriptor < 0:
                raise OSError(errno.EBADF, f"{self._path} is closed")
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
        # Somebody may have emptied it.
        num_bytes, mark, num_files = _CONTENT.unpack(content.ljust(_CONTENT.size, b"\0"))
        return Held(num_bytes, num_files), mark == _SETTLED

    def _write(self, held: Held, *, is_settled: bool) -> None:
        os.pwrite(self._descriptor, _CONTENT.pack(held.num_bytes, _SETTLED * is_settled, held.num_files), 0)

    def _close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
