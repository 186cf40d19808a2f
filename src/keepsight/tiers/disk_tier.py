"""Entries in files, one file each, named by their keys: they survive restarts, and several servers may share them.

A file is written aside, renamed to its key when complete, and never changed. It is not synced: a file torn by a power
failure fails its checksum, counts as a miss, and is removed. The ledger holds the number of files and their bytes,
including files being written; files are added and removed only under its lock. Invariant: these bytes never exceed
`max_bytes`, whichever process is killed at whatever point; only their owner can read the files; pinned entries are
never evicted for others. A folder that cannot be written to when it is opened is only read.
"""

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from keepsight.errors import TierError
from keepsight.ipc.ledger import Held, Ledger
from keepsight.ipc.record_lock import let_others_in
from keepsight.tiers.check_folder import refuse_dangling, refuse_if_shared, warn_if_open
from keepsight.tiers.damage_log import DamageLog
from keepsight.tiers.disk_files import (
    READING,
    TierFile,
    entries_in,
    files_in,
    occupied,
    remove_dead,
    seconds_of,
)
from keepsight.tiers.entry_format import HEADER_BYTES, DamagedEntryError, pack_header, read_entry
from keepsight.tiers.entry_key import is_entry_key
from keepsight.tiers.fullness import Fullness
from keepsight.tiers.known_files import KnownFiles
from keepsight.tiers.pins import pins_in
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.tier import OnDrop, StoredArray, TierStats, ignore_drop

logger = logging.getLogger(__name__)

# Errors which mean that only this file is not ours: it is a link, a socket or another user's.
_STRANGE = frozenset({errno.ELOOP, errno.ENXIO, errno.EACCES})
# Errors which mean only that nothing more can be written to the disk: it is full, or closed to this process.
_CLOSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_NO_ROOM = _CLOSED | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Bytes of a file read at a time: checked while still in the core's cache, and while the disk reads the next piece.
_PIECE = 256 * 1024
# Fraction of the budget (1/64) freed at once if several servers share it: to choose well they must scan all files.
_SLACK = 64
# Most files that are removed before other processes, which wait for the ledger only so long, get their turn.
_PORTION = 1000


class DiskTier:
    """One per process, on the same folder with the same budget; an unusable folder raises later, when it is used."""

    name = "disk"

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        policy: str = "lru",
        *,
        now_ns: Callable[[], int] = time.time_ns,
        on_drop: OnDrop = ignore_drop,
    ) -> None:
        """`on_drop` is called with keys that are no longer known to be held."""
        self._directory, self._max_bytes, self._now_ns = directory, max_bytes, now_ns
        self._entries, self._aside = directory / "entries", directory / "aside"
        self._known, self._pins = KnownFiles(POLICIES[policy](max_bytes), on_drop), pins_in(directory)
        self._fullness = Fullness(directory, max_bytes)
        self._ledger = Ledger(directory / "ledger")
        # Keys of entries that count as gone, though they could not be removed.
        self._ignored: set[str] = set()
        self._damage = DamageLog(directory)
        self._num_evictions = 0

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Return whether a disk tier was ever opened in this folder. Raises TierError if it is a link to nothing."""
        refuse_dangling(directory)
        return (directory / "entries").is_dir()

    # Lookup ---------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        return key in self._known

    def get(self, key: str) -> StoredArray | None:
        if not self._ledger.is_open:
            self.open()
        if key in self._ignored:
            return None
        try:
            return self._read(key, is_use=True)
        except FileNotFoundError:
            # The whole folder may be gone; then create it again.
            self.open()
            self._known.forget(key)
            return None
        except DamagedEntryError:
            return None

    def _read(self, key: str, *, is_use: bool) -> StoredArray:
        """Read an entry. Raises FileNotFoundError; DamagedEntryError if it was damaged and is removed now."""
        descriptor = None
        try:
            # Joined as strings: `Path` objects would take longer than anything else here but reading the bytes.
            descriptor = _open(f"{self._entries}/{_checked(key)}")
            array = _read_file(key, descriptor)
            if is_use:
                self._note_use(key, descriptor, array)
            return array
        except DamagedEntryError as error:
            self._remove_damaged(key, descriptor, error)
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _note_use(self, key: str, descriptor: int, array: StoredArray) -> None:
        now = self._now_ns()
        # If the use cannot be recorded, only the eviction order suffers.
        with suppress(OSError):
            os.utime(descriptor, ns=(now, now))
        if key not in self._known:
            # Others have stored it, and perhaps more: a hit in a folder that seems empty would puzzle.
            with suppress(OSError):
                self._ledger.read_again()
        self._learn(key, array, now)

    def _learn(self, key: str, array: StoredArray, last_use: int) -> None:
        self._ignored.discard(key)
        self._known.learn(key, occupied(HEADER_BYTES + array.num_bytes), array.seconds, last_use)

    def _remove_damaged(self, key: str, descriptor: int | None, error: DamagedEntryError) -> None:
        fate = "removed"
        try:
            with self._changing(), suppress(FileNotFoundError):
                # Another process may have stored it anew meanwhile.
                if descriptor is None or os.path.samestat(os.fstat(descriptor), (self._entries / key).lstat()):
                    self._remove(key)
        except OSError as failure:
            if failure.errno not in _NO_ROOM:
                raise
            self._ignore(key)
            fate = f"ignored, as it cannot be removed ({failure.strerror})"
        self._damage.report(self._entries / key, error, fate)

    def list_sizes(self) -> dict[str, int]:
        """Return the bytes of all entries, including those that other processes stored."""
        self.open()
        if self._ledger.is_read_only:
            self._learn_all(entries_in(self._entries))
        else:
            self._learn_new()
            with self._changing():
                self._count()
        return self._known.sizes

    def verify(self, key: str) -> bool:
        """Return False if the entry was damaged; it is removed then, if it can be. Does not count as a use."""
        self.open()
        try:
            self._read(key, is_use=False)
        except DamagedEntryError:
            return False
        except FileNotFoundError:
            pass
        return True

    # Adding and removing --------------------------------------------------------------------------------------

    def put(self, key: str, array: StoredArray) -> bool:
        self.open()
        try:
            return self._put(key, array)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._fullness.report(error, occupied(HEADER_BYTES + array.num_bytes))
            return False

    def _put(self, key: str, array: StoredArray) -> bool:
        num_bytes = HEADER_BYTES + array.num_bytes
        if self._fullness.turns_away(occupied(num_bytes)):
            return False
        header = pack_header(_checked(key), array)
        with self._changing():
            if (path := self._entries / key).exists():
                # Another process has stored it meanwhile, or it is a stray folder.
                if is_file := path.is_file():
                    self._learn(key, array, self._now_ns())
                return is_file
            if not self._make_room(occupied(num_bytes)):
                return False
            aside, descriptor = self._reserve(num_bytes)
        try:
            _write(descriptor, header, array.payload)
            self._give_name(key, aside, array)
        except BaseException:
            self._give_back(aside)
            raise
        finally:
            os.close(descriptor)
        # Not for an entry that another process stored: that says nothing of the room.
        self._fullness.end(occupied(num_bytes))
        return True

    def note_use(self, key: str) -> None:
        now = self._now_ns()
        # If the use cannot be recorded, only the eviction order suffers.
        with suppress(OSError):
            os.utime(self._entries / _checked(key), ns=(now, now), follow_symlinks=False)
            self._known.note_use(key, now)

    def clear(self) -> None:
        self.open()
        if self._ledger.is_read_only:
            for file in entries_in(self._entries):
                self._ignore(file.name)
            logger.warning(
                "%s can only be read: what was to be cleared stays there; this process ignores it", self._directory
            )
            return
        entries = entries_in(self._entries)
        for start in range(0, len(entries) - _PORTION, _PORTION):
            with self._changing():
                self._remove_all(entries[start : start + _PORTION])
            let_others_in()
        with self._changing():
            self._remove_all(entries_in(self._entries))
            self._count()

    def _ignore(self, key: str) -> None:
        self._ignored.add(key)
        self._known.forget(key)

    def stats(self) -> TierStats:
        num_bytes, num_files = self._ledger.known
        return TierStats(num_bytes, self._max_bytes, num_files, self._num_evictions, self._damage.num_damaged)

    def close(self) -> None:
        self._ledger.close()

    def check_invariants(self) -> None:
        self.open()
        with self._changing():
            held = self._ledger.held
            assert held.num_bytes <= self._max_bytes, (held, self._max_bytes)
            assert self._add_up(entries_in(self._entries)) == held
        self._known.check_invariants()

    # The folder -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the folder unless it is open, creating it if needed; an earlier fault may have been fixed by now."""
        # `aside` is usually empty: whatever removes empty folders removes it alone. It is needed only for writing.
        if self._ledger.is_open and self._entries.is_dir() and (self._ledger.is_read_only or self._aside.is_dir()):
            return
        refuse_dangling(self._directory)
        for folder in (self._directory, self._entries):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._aside.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
        for folder in filter(Path.exists, (self._entries, self._aside)):
            refuse_if_shared(folder)
        may_write = all(os.access(folder, os.W_OK) for folder in (self._entries, self._aside))
        self._ledger.open(is_read_only=not may_write)
        warn_if_open(self._directory)
        if not may_write:
            self._fullness.report("it can only be read")
            self._learn_all(entries_in(self._entries))
            return
        # Unless its pins can be listed, nothing may be evicted. Better said now than when the tier is full.
        with suppress(FileNotFoundError):
            refuse_if_shared(self._pins.folder)
        self._learn_new()
        num_before = self._num_evictions
        with self._changing():
            self._count()
            self._make_room(0)
        if num_evicted := self._num_evictions - num_before:
            reason = "%s held more than the %d bytes given to this process: %d entries were evicted"
            logger.warning(reason, self._directory, self._max_bytes, num_evicted)

    def _learn_new(self) -> None:
        """Read the headers of files that are not known, before the lock is taken: of many files this takes seconds.

        Some may be gone by now; counting them under the lock forgets these.
        """
        for last_use, key, num_bytes in sorted(entries_in(self._entries)):
            if key not in self._known:
                self._known.learn(key, num_bytes, seconds_of(self._entries / key), last_use)

    # Under the ledger's lock ----------------------------------------------------------------------------------

    def _changing(self) -> AbstractContextManager[None]:
        """Hold the ledger's lock. If a process was killed while it held the lock, count all files first."""
        return self._ledger.changing(self._count)

    def _make_room(self, num_bytes: int) -> bool:
        """Make room for `num_bytes`. Return False if what would have to go is pinned."""
        if self._has_room(num_bytes):
            return True
        # While no other process adds entries, this process's own knowledge suffices.
        if self._knows_all():
            self._evict(num_bytes)
        if not self._has_room(num_bytes) and not self._knows_all():
            # Others have added entries, or have replaced some by as many bytes, so that chosen ones were already gone.
            self._count()
            self._evict(min(self._max_bytes, num_bytes + self._max_bytes // _SLACK))
        if self._has_room(num_bytes):
            return True
        self._blame_pins(num_bytes)
        return False

    def _knows_all(self) -> bool:
        """Return whether this process knows all files, as far as their number and total size tell."""
        return self._ledger.held == Held(self._known.num_bytes, len(self._known))

    def _evict(self, goal: int) -> None:
        """Evict until `goal` bytes are free, as far as pins allow."""
        if not os.access(self._entries, os.W_OK):
            # Entries chosen to go would be forgotten although they stay.
            raise PermissionError(errno.EACCES, "Permission denied", str(self._entries))
        self._known.spare(frozenset(self._pins))
        while not self._has_room(goal) and (chosen := self._known.choose()) is not None:
            self._num_evictions += self._unlink(self._entries / chosen[0], chosen[1])

    def _has_room(self, num_bytes: int) -> bool:
        return self._ledger.held.num_bytes + num_bytes <= self._max_bytes

    def _blame_pins(self, num_bytes: int) -> None:
        """Log that pins take the room. Raises TierError if it is not they that take it."""
        num_pinned = self._known.num_bytes
        if num_pinned + num_bytes <= self._max_bytes:
            raise TierError(f"{self._directory} is full of entries being written")
        self._fullness.report(f"{num_pinned} of {self._max_bytes} bytes are pinned (keepsight cache unpin)", num_bytes)

    def _reserve(self, num_bytes: int) -> tuple[Path, int]:
        """Create a file of its final size, so that every count includes it and a full disk is noticed now."""
        path = self._aside / secrets.token_hex(16)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Held for as long as the writing process lives.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        self._ledger.add_file(occupied(num_bytes))
        return path, descriptor

    def _give_name(self, key: str, aside: Path, array: StoredArray) -> None:
        now = self._now_ns()
        with self._changing():
            path = self._entries / key
            if path.exists():
                self._unlink(aside)
                return
            os.utime(aside, ns=(now, now))
            aside.rename(path)
            self._learn(key, array, now)

    def _give_back(self, aside: Path) -> None:
        # If this fails, too, the next count finds the file.
        with suppress(OSError, TierError), self._changing():
            self._unlink(aside)

    def _remove(self, key: str) -> bool:
        """Return False if there was no file: others may have removed what this process knew."""
        was_there = self._unlink(self._entries / key, self._known.size_of(key))
        self._known.forget(key)
        return was_there

    def _remove_all(self, entries: list[TierFile]) -> None:
        for file in entries:
            self._remove(file.name)

    def _unlink(self, path: Path, counted: int | None = None) -> bool:
        with suppress(FileNotFoundError, IsADirectoryError):
            num_bytes = occupied(path.lstat().st_size)
            path.unlink()
            self._ledger.remove_file(min(num_bytes, num_bytes if counted is None else counted))
            return True
        return False

    def _count(self) -> None:
        """Count all files anew, as others add, use and remove entries. Remove unfinished files of killed processes."""
        for file in files_in(self._aside):
            remove_dead(self._aside / file.name)
        entries = entries_in(self._entries)
        self._learn_all(entries)
        self._ledger.held = self._add_up(entries)

    def _add_up(self, entries: list[TierFile]) -> Held:
        """Add up these and the files aside."""
        return Held.of(file.num_bytes for file in (*entries, *files_in(self._aside)))

    def _learn_all(self, entries: list[TierFile]) -> None:
        for key in self._known.sizes.keys() - {file.name for file in entries}:
            self._known.forget(key)
        for last_use, key, num_bytes in sorted(entries):
            if last_use != self._known.last_use_of(key):
                seconds = 0.0 if key in self._known else seconds_of(self._entries / key)
                self._known.learn(key, num_bytes, seconds, last_use)


def _checked(key: str) -> str:
    assert is_entry_key(key), key
    return key


def _open(path: str) -> int:
    try:
        return os.open(path, READING)
    except OSError as error:
        if error.errno not in _STRANGE:
            raise
        os.lstat(path)  # raises if it is the folder, not the file, that is closed to this process
        raise DamagedEntryError(error.strerror) from error


def _read_file(key: str, descriptor: int) -> StoredArray:
    about = os.fstat(descriptor)
    if stat.S_ISDIR(about.st_mode):
        raise FileNotFoundError(f"{key} is a stray folder")
    if not stat.S_ISREG(about.st_mode):
        raise DamagedEntryError("not a file")
    return read_entry(key, about.st_size, lambda target: os.readv(descriptor, [target[:_PIECE]]))


def _write(descriptor: int, header: bytes, payload: memoryview) -> None:
    left = [memoryview(header), payload]
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
