"""The folder that the processes of one server share: sockets, and memory that is a file.

Lies in /dev/shm where that can be, and is open to its user alone.  Its owner (the supervisor, or an `LLM`) holds a lock
on it, which the kernel drops when the last process that inherited it ends.  Invariant: a folder whose lock nobody holds
is nobody's; whoever starts next removes it.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

PREFIX = "keepsight-"
SHARED_MEMORY = Path("/dev/shm")


class RunDirectory:
    """A folder that this process owns, or (opened by its path) one that another owns."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock, self._owner = lock, os.getpid()

    @classmethod
    def create(cls, shared_memory: Path = SHARED_MEMORY) -> Self:
        clean_dead((shared_memory, _temporary()))
        try:
            return cls._create_in(shared_memory)
        except OSError as error:
            logger.warning("%s cannot be used (%s): the run directory lies in %s", shared_memory, error, _temporary())
            return cls._create_in(_temporary())

    @classmethod
    def _create_in(cls, parent: Path) -> Self:
        """Another's `clean_dead` may come between creating and locking: then the folder is gone, and made anew."""
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            lock = _try_lock(path)
            if lock is not None:
                return cls(path, lock)

    @property
    def is_shared_memory(self) -> bool:
        """Files here are memory, which never waits for a disk."""
        return self.path.parent == SHARED_MEMORY

    @property
    def num_free_bytes(self) -> int:
        """That files here may still grow by, all together."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Removes it; in a process that does not own it, forked ones too, nothing."""
        if self._lock is None or self._owner != os.getpid():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clean_dead(parents: Iterable[Path]) -> None:
    """Removes this user's folders of which no process is left."""
    for path in [path for parent in parents for path in parent.glob(f"{PREFIX}*")]:
        lock = _try_lock(path)
        if lock is not None:
            logger.info("removing %s, which a server left behind", path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None if another has it, or the folder is gone or not this user's."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it before may have removed the folder.
        if os.fstat(lock).st_uid == os.geteuid() and os.path.samestat(os.fstat(lock), path.lstat()):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
