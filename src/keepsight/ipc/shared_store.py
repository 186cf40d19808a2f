"""An LRU cache of pixels that all processes of one server share: a file for each item, in shared memory.

Knows neither how pixels are made nor who asks. A file gets its name only once it is complete, is never changed, and is
mapped for reading: a reader keeps its pixels even after their eviction. The ledger holds the number of files and their
bytes; files are added and removed only under its lock. Invariant: these bytes, as the file system counts them, never
exceed `max_bytes`.
"""

import logging
import math
import mmap
import os
import re
import struct
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path

import numpy as np

from keepsight.ipc.ledger import Held, Ledger
from keepsight.ipc.pinned_files import PinnedFiles
from keepsight.ipc.record_lock import opened, try_lock
from keepsight.ipc.shared_names import SharedNames
from keepsight.ipc.unnamed_file import give_name, open_unnamed
from keepsight.lru_cache import PINNABLE_PART, CacheSize
from keepsight.pixels import HeldPixels
from keepsight.requests import Pixels

logger = logging.getLogger(__name__)

_MEDIA_HASH = re.compile(r"[0-9a-f]{32,128}")
_HEADER = struct.Struct("<8s3I44x")  # magic, shape; the pixels begin aligned
_MAGIC = b"KSPIXEL1"
_PAGE = mmap.PAGESIZE
# The largest pictures take 6 s to make: a process that takes longer was most likely stopped.
_PATIENCE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    last_use: int
    num_bytes: int


class SharedStore:
    """Shared by threads and processes; each process has its own instance, with the same folder and budget."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Raises OSError if files cannot be made there."""
        self._directory, self._max_bytes = directory / "pixels", max_bytes
        # Without its parents: if the run directory was removed, nobody would lock another, and others might read it.
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._claims = directory / "claims"
        self._pins, self._first = PinnedFiles(directory / "pins"), SharedNames(directory / "first")
        self._ledger = Ledger(directory / "ledger")
        self._ledger.open()
        # The files of the last count, oldest first. Files not in it, or used since, are younger than all of these.
        self._oldest: deque[_File] = deque()
        self._warned: set[str] = set()
        self.num_evictions = 0

    # Lookup ---------------------------------------------------------------------------------------------------

    def touch(self, media_hash: str) -> bool:
        """Make it the most recently used; return False if it is not held."""
        if not _MEDIA_HASH.fullmatch(media_hash):
            return False
        try:
            _stamp(self._directory / media_hash)
        except OSError:
            return False
        return True

    def read(self, media_hash: str) -> Pixels | None:
        """Return the pixels as a read-only map of their file. Counts as a use."""
        if not self.touch(media_hash):
            return None
        try:
            pixels = _map(self._directory / media_hash)
        except OSError:
            # It was evicted just now, or there are too many memory maps.
            return None
        if pixels is None:
            self.drop(media_hash)
        return pixels

    def look(self, media_hash: str) -> Pixels | None:
        """Like `read`, but does not count as a use."""
        if not self.is_held(media_hash):
            return None
        with suppress(OSError):
            return _map(self._directory / media_hash)
        return None

    def newest(self, limit: int) -> list[HeldPixels]:
        """Return the items used last, the latest first. Takes no lock: some may be evicted meanwhile."""
        files = nlargest(limit, self._list_files(), key=lambda file: file.last_use)
        return [HeldPixels(file.name, file.num_bytes, file.name in self._pins) for file in files]

    def is_held(self, media_hash: str) -> bool:
        """Return whether it is held. Does not count as a use."""
        return _MEDIA_HASH.fullmatch(media_hash) is not None and (self._directory / media_hash).exists()

    @property
    def num_bytes(self) -> int:
        return self._ledger.held.num_bytes

    def size(self) -> CacheSize:
        """Return the store's size; 0 once it is closed. Evictions are those of this process."""
        held = Held(0, 0)
        with suppress(OSError):
            held = self._ledger.held
        return CacheSize(held.num_bytes, self._max_bytes, held.num_files, self.num_evictions)

    # Adding and removing --------------------------------------------------------------------------------------

    def put(self, media_hash: str, pixels: Pixels) -> bool:
        """Store pixels; return whether they are held now. False if there is no room even after evictions."""
        if not _MEDIA_HASH.fullmatch(media_hash):
            return False
        if self.touch(media_hash):
            return True
        num_bytes = -(-(_HEADER.size + pixels.nbytes) // _PAGE) * _PAGE
        if num_bytes > self._max_bytes:
            message = "an item of %d bytes exceeds the store of %d bytes: such items are served but not stored"
            self._warn_once(message, num_bytes, self._max_bytes)
            return False
        try:
            with self._changing() as is_held:
                return is_held and self._add(media_hash, pixels, num_bytes)
        except OSError as error:
            self._warn_once("the store cannot be written: %s: such items are served but not stored", error)
            return False

    def pin(self, media_hash: str, seconds: float) -> bool:
        """Pin it for `seconds` from now, for all processes, whatever was said before.

        Returns False if it is not held, or too much is pinned already.
        """
        with self._changing() as is_held:
            if not is_held or not self.touch(media_hash):
                return False
            others = sum(num_bytes for name, num_bytes in self._count_pinned().items() if name != media_hash)
            if others + _bytes_of(self._directory / media_hash) > self._max_bytes * PINNABLE_PART:
                return False
            try:
                self._pins.add(media_hash, seconds)
            except OSError as error:
                self._warn_once("a pin cannot be written: %s", error)
                return False
            return True

    def unpin(self, media_hash: str) -> None:
        if _MEDIA_HASH.fullmatch(media_hash):
            self._pins.remove(media_hash)

    def evict_first(self, media_hash: str) -> None:
        """Let it be evicted before all items not so marked, however they are used; pins hold. No lock; never fails."""
        if self.is_held(media_hash):
            with suppress(OSError):
                self._first.add(media_hash)

    def undo_evict_first(self, media_hash: str) -> None:
        """Undo `evict_first`, and count as a use."""
        if self.touch(media_hash):
            self._first.remove(media_hash)

    def keep_all_again(self) -> None:
        self._first.remove(*self._first)

    def drop(self, media_hash: str) -> None:
        """Remove it, pinned or not."""
        if _MEDIA_HASH.fullmatch(media_hash):
            with self._changing() as is_held:
                if is_held:
                    self._remove(media_hash)

    def clear(self) -> None:
        """Remove everything, pins too. Raises OSError if it is closed, or another process holds its ledger for long."""
        with self._ledger.changing(self._count_anew):
            for file in self._list_files():
                self._remove(file.name)
            self._ledger.held = Held(0, 0)

    @contextmanager
    def making(self, media_hashes: Collection[str]) -> Iterator[None]:
        """Let only one caller in all processes make an item at a time: wait here, then look whether it is there by now.

        Better made twice than not at all: if no claim can be made, or its holder was stopped, this goes on without one.
        """
        # A lock byte for each name, in a file that stays empty; always locked in the same order, to avoid deadlocks.
        places = sorted({int(media_hash[:15], 16) for media_hash in media_hashes if _MEDIA_HASH.fullmatch(media_hash)})
        with ExitStack() as held:
            with suppress(OSError):
                claims = held.enter_context(opened(self._claims, os.O_RDWR | os.O_CREAT))
                for place in places:
                    if not held.enter_context(try_lock(claims, place, patience=_PATIENCE_SECONDS)):
                        break
            yield

    def close(self) -> None:
        self._ledger.close()

    def check_invariants(self) -> None:
        with self._changing() as is_held:
            assert is_held
            assert Held.of(file.num_bytes for file in self._list_files()) == self._ledger.held
            assert self.num_bytes <= self._max_bytes

    # Under the ledger's lock ----------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[bool]:
        """Hold the ledger's lock. Yield False if the ledger is closed, or the lock's holder was stopped."""
        with ExitStack() as held:
            try:
                held.enter_context(self._ledger.changing(self._count_anew))
            except OSError:
                yield False
            else:
                yield True

    def _count_anew(self) -> None:
        self._ledger.held = Held.of(file.num_bytes for file in self._list_files())

    def _add(self, media_hash: str, pixels: Pixels, num_bytes: int) -> bool:
        while self.num_bytes + num_bytes > self._max_bytes:
            if not self._evict_one():
                return False
        descriptor = open_unnamed(self._directory)
        try:
            _write(descriptor, pixels)
            _stamp(descriptor)
            give_name(descriptor, self._directory / media_hash)
            # Remove a mark that was made while an earlier file of this name was being removed.
            self._first.remove(media_hash)
            self._ledger.add_file(os.fstat(descriptor).st_blocks * 512)
        except FileExistsError:
            self.touch(media_hash)
        finally:
            os.close(descriptor)
        return True

    def _evict_one(self) -> bool:
        """Evict an item, or find that it was used meanwhile; return False if all that is left is pinned."""
        if (name := self._find_first()) is not None:
            self._remove(name)
            self.num_evictions += 1
            return True
        if not self._oldest:
            files, pinned = self._list_files(), self._count_pinned()
            unpinned = (file for file in files if file.name not in pinned)
            self._oldest = deque(sorted(unpinned, key=lambda file: file.last_use))
            self._ledger.held = Held.of(file.num_bytes for file in files)
            if not self._oldest:
                return False
        file = self._oldest.popleft()
        with suppress(FileNotFoundError):
            if (self._directory / file.name).stat().st_mtime_ns == file.last_use:
                self._remove(file.name)
                self.num_evictions += 1
        return True

    def _find_first(self) -> str | None:
        for name in self._first:
            if not (self._directory / name).exists():
                self._first.remove(name)
            elif name not in self._pins:
                return name
        return None

    def _count_pinned(self) -> dict[str, int]:
        """Return the pinned bytes by name. Pins that have ended, or whose pixels have gone, are removed."""
        pinned: dict[str, int] = {}
        for name in self._pins:
            num_bytes = _bytes_of(self._directory / name) if name in self._pins else 0
            if num_bytes:
                pinned[name] = num_bytes
            else:
                self._pins.remove(name)
        return pinned

    def _remove(self, name: str) -> None:
        path = self._directory / name
        with suppress(FileNotFoundError):
            num_bytes = _bytes_of(path)
            path.unlink()
            self._ledger.remove_file(num_bytes)
        self._pins.remove(name)
        self._first.remove(name)

    def _list_files(self) -> list[_File]:
        """List all files that have a name."""
        files = []
        with suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process evicted it
                    found = entry.stat()
                    files.append(_File(entry.name, found.st_mtime_ns, found.st_blocks * 512))
        return files

    def _warn_once(self, message: str, *arguments: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *arguments)


def _stamp(target: Path | int) -> None:
    """Set the time of the last use. The kernel's own time stamps are milliseconds apart, and may go back."""
    now = time.monotonic_ns()
    os.utime(target, ns=(now, now))


def _write(descriptor: int, pixels: Pixels) -> None:
    """Write with system calls, not through a map: if memory runs out they fail, but a map would kill the process."""
    payload = np.ascontiguousarray(pixels).data.cast("B")
    written = os.write(descriptor, _HEADER.pack(_MAGIC, *pixels.shape))
    while written < _HEADER.size + len(payload):
        # A write is short if there is no more room; the next one fails.
        written += os.write(descriptor, payload[written - _HEADER.size :])


def _bytes_of(path: Path) -> int:
    """Return a file's bytes as the file system counts them; 0 if there is no file."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _map(path: Path) -> Pixels | None:
    """Map a file's pixels; None if it is not what `_write` wrote."""
    with opened(path, os.O_RDONLY) as descriptor:
        if os.fstat(descriptor).st_size < _HEADER.size:
            return None
        content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    magic, *shape = _HEADER.unpack_from(content)
    pixels: Pixels = np.frombuffer(content, np.uint8, offset=_HEADER.size)
    return pixels.reshape(shape) if magic == _MAGIC and pixels.size == math.prod(shape) else None
