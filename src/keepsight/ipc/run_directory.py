"""The folder that the processes of one server share: for sockets, and for files in shared memory.

Lies in /dev/shm if possible, and is open to its user alone. Its owner (the supervisor, or an `LLM`) holds a lock on it,
which the kernel releases when the last process that inherited it ends. Invariant: a folder that bears our mark and is
not locked is no longer in use; the next server to start removes it.
"""

import errno
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from keepsight.errors import ServerStartError

logger = logging.getLogger(__name__)

PREFIX = "keepsight-run-"
# The mark. A name alone is not enough: anybody may have a folder of that name, but hardly with these permissions (with
# the sticky bit, as /tmp has it).
RIGHTS = 0o700 | stat.S_ISVTX
SHARED_MEMORY = Path("/dev/shm")
# Room for the table of handles, and for the folders themselves.
MIN_FREE_BYTES = 256 * 1024
# Room for what a server writes as it starts, mostly the table of uuids and the two databases, and enough more to keep
# something in these.
MIN_FREE_BYTES_OF_SERVER = 22 * 2**18
# Room for the accounts of its last requests.
MIN_FREE_BYTES_OF_FRONTEND = 2**19
# The number of those files, with a few for each process. Kept pixels take more; with too few left, fewer are kept.
MIN_FREE_FILES = 32
# The kernel's limit for a socket's path, and what it leaves for the parent folder of a run directory with sockets.
MAX_SOCKET_PATH = 107
MAX_PARENT_OF_SOCKETS = MAX_SOCKET_PATH - len(f"/{PREFIX}12345678/engine-1234567")


class RunDirectory:
    """A run directory that this process owns, or (opened by its path) one that another process owns."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock, self._owner = lock, os.getpid()

    @classmethod
    def create(cls, shared_memory: Path = SHARED_MEMORY, *, num_frontends: int = 0) -> Self:
        """Create a run directory. Raises ServerStartError if there is no place for it.

        `num_frontends`: of the server that it is for, which has sockets in it; 0 for an `LLM`.
        """
        clean_dead(shared_memory)
        reasons = []
        for place in _list_places(shared_memory):
            try:
                if num_frontends:
                    _refuse_if_long(place)
                    _refuse_if_not_text(place)
                _refuse_if_full(place, num_frontends)
                return cls._create_in(place)
            except OSError as error:
                logger.warning("%s cannot be used for the run directory: %s", place, error)
                reasons.append(f"{place}: {error.strerror}")
        found = "; ".join(reasons)
        raise ServerStartError(f"neither {shared_memory} nor any folder for temporary files can be used ({found})")

    @classmethod
    def _create_in(cls, parent: Path) -> Self:
        """Create and lock a folder. If another process's `clean_dead` removes it before it is locked, start over."""
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            try:
                lock = _try_lock(path)
                if lock is not None:
                    os.fchmod(lock, RIGHTS)
                    return cls(path, lock)
            except OSError:  # a file system without locks, or one where new files belong to another user
                shutil.rmtree(path, ignore_errors=True)
                raise

    @property
    def is_shared_memory(self) -> bool:
        """True if files here are memory, which never waits for a disk."""
        return self.path.parent == SHARED_MEMORY

    @property
    def num_free_bytes(self) -> int:
        """The number of bytes by which files here may still grow, all together."""
        return _num_free_bytes(self.path)

    def close(self) -> None:
        """Remove the folder; do nothing in a process that does not own it, such as a forked one."""
        if self._lock is None or self._owner != os.getpid():
            return
        shutil.rmtree(self.path, ignore_errors=True)
        # Reset first: if this were interrupted, the next call would close whatever has the number by then.
        lock, self._lock = self._lock, None
        os.close(lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def clean_dead(shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove this user's run directories whose processes have all ended."""
    for path in [path for place in _list_places(shared_memory) for path in place.glob(f"{PREFIX}*")]:
        with suppress(OSError):
            if (lock := _try_lock(path)) is not None:
                _remove(path, lock)
                os.close(lock)


def _remove(path: Path, lock: int) -> None:
    if stat.S_IMODE(os.fstat(lock).st_mode) == RIGHTS:
        logger.info("removing %s, which a server left behind", path)
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.rmdir()  # left by a server that was killed before it could mark it


def _list_places(shared_memory: Path) -> tuple[Path, ...]:
    """Return the possible parent folders of a run directory, the best first."""
    try:
        return shared_memory, Path(tempfile.gettempdir())
    except OSError:  # everything else is read-only, as in many containers
        return (shared_memory,)


def _refuse_if_full(folder: Path, num_frontends: int) -> None:
    found = os.statvfs(folder)
    has_files = found.f_favail >= MIN_FREE_FILES or not found.f_files  # `f_files` is 0 if files are not counted
    num_bytes = MIN_FREE_BYTES
    if num_frontends:
        num_bytes = MIN_FREE_BYTES_OF_SERVER + num_frontends * MIN_FREE_BYTES_OF_FRONTEND
    if not has_files or _num_free_bytes(folder) < num_bytes:
        reason = f"{os.strerror(errno.ENOSPC)} for {num_bytes} bytes and {MIN_FREE_FILES} files"
        raise OSError(errno.ENOSPC, reason, str(folder))


def _refuse_if_long(folder: Path) -> None:
    if len(os.fsencode(folder)) > MAX_PARENT_OF_SOCKETS:
        reason = f"a folder whose path is longer than {MAX_PARENT_OF_SOCKETS} bytes cannot hold sockets (see TMPDIR)"
        raise OSError(errno.ENAMETOOLONG, reason)


def _refuse_if_not_text(folder: Path) -> None:
    """Its path is sent to the server's processes."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise OSError(errno.EILSEQ, "its path is not UTF-8 (see TMPDIR)") from None


def _num_free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _try_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None if another process has it, or the folder is gone.

    Raises OSError if there are no locks, or the folder cannot be opened or is not this user's.
    """
    with ExitStack() as stack, suppress(BlockingIOError, FileNotFoundError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, lock)
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(path))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have removed the folder.
        if os.path.samestat(os.fstat(lock), path.lstat()):
            stack.pop_all()
            return lock
    return None
