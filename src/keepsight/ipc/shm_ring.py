"""A ring buffer of pixels in a file of shared memory: one process writes, many read, the oldest are overwritten first.

    file:   [magic][key] entries...          entry: [4-byte id][4-byte size] object, and so on at multiples of 64 bytes
    object: [4-byte reference count][signature, shape] payload

Only the writer knows which media lie where. A reader is told the place, copies the pixels, and checks afterwards that
they were not overwritten meanwhile. The reference count is the number of current readers. Each of them also holds a
lock on the entry, which dies with it: so a count that a dead reader left is recognized, and an entry that is not being
read blocks no one. Invariants: the file's size never changes, and all of it is allocated; a place gives the pixels that
it was made for, or None.
"""

import fcntl
import mmap
import os
import re
import secrets
import struct
import threading
from collections import deque
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keepsight.ipc.record_lock import opened, try_lock
from keepsight.ipc.unnamed_file import give_name, open_unnamed
from keepsight.lru_cache import CacheSize
from keepsight.pixels import HeldPixels, shape_of
from keepsight.requests import Pixels, RingPlace

_PREFIX = "ring-"
_RING_ID = re.compile(r"[0-9a-f]{16}")
_FILE = struct.Struct("<8s32s")
_MAGIC = b"KSRING01"
_ENTRY = struct.Struct("<II")
_COUNT = struct.Struct("<I")
# The id, the size, the count, the signature, the shape.
_HEADER = struct.Struct("<III16s3I")
_UNIT = 64
# The offsets of an entry's payload, and of the file's first entry.
_HEADER_BYTES = _FIRST = _UNIT
_LAST_ID = (1 << 32) - 1
# One call writes no more than 2 GiB.
_MOST_OBJECT_BYTES = (1 << 31) - (1 << 16)
# Lock bytes lie beyond the file's end, two for each id, so that a reader of a cleared entry never blocks the entry that
# took its place.
_LOCKS = 1 << 48
# A count is locked for microseconds: a process that holds the lock longer was stopped.
_PATIENCE_SECONDS = 1.0

assert _HEADER.size <= _HEADER_BYTES
assert _FILE.size <= _FIRST


@dataclass(frozen=True, slots=True)
class _Entry:
    media_hash: str
    place: RingPlace
    num_bytes: int

    @property
    def start(self) -> int:
        return self.place.offset

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class RingWriter:
    """Creates and writes a ring; shared by threads."""

    def __init__(self, directory: Path, max_bytes: int, max_object_bytes: int) -> None:
        """Create a ring, and remove those of dead writers. Raises OSError if there is not enough room."""
        remove_dead_rings(directory)
        self._directory, self._ring_id, self._key = directory, secrets.token_hex(8), secrets.token_bytes(32)
        self.num_bytes = max(max_bytes, 2 * _UNIT) // _UNIT * _UNIT
        self._max_object_bytes = min(max_object_bytes, _MOST_OBJECT_BYTES)
        self._descriptor = open_unnamed(directory)
        try:
            # Otherwise a full /dev/shm would show only when something is written.
            os.posix_fallocate(self._descriptor, 0, self.num_bytes)
            os.pwrite(self._descriptor, _FILE.pack(_MAGIC, self._key), 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            give_name(self._descriptor, _path_of(directory, self._ring_id))
        except OSError:
            os.close(self._descriptor)
            raise
        self._reader = RingReader(directory)
        self._lock = threading.Lock()
        self.num_evictions = 0
        # Oldest first. A dropped entry keeps its place until that is taken back under the lock of its count; otherwise
        # a reader that is about to increment the count would write into the entry that came next.
        self._entries: deque[_Entry] = deque()
        self._index: dict[str, _Entry] = {}
        # Of the entries in `_index`.
        self._num_held_bytes = 0
        self._next_start, self._next_id = _FIRST, 1

    def find(self, media_hash: str) -> RingPlace | None:
        with self._lock:
            entry = self._index.get(media_hash)
        return None if entry is None else entry.place

    def read(self, media_hash: str) -> Pixels | None:
        place = self.find(media_hash)
        return None if place is None else self._reader.read(place)

    def newest(self, limit: int) -> list[HeldPixels]:
        """Return the entries that were put last, the newest first."""
        with self._lock:
            entries = list(islice(reversed(self._index.values()), limit))
        return [HeldPixels(entry.media_hash, entry.num_bytes, is_pinned=False) for entry in entries]

    def put(self, media_hash: str, pixels: Pixels) -> RingPlace | None:
        """Write pixels; known ones stay where they are. None: too large, or an entry in the way is being read."""
        with self._lock:
            if known := self._index.get(media_hash):
                return known.place
            num_bytes = _entry_bytes(pixels)
            may_hold = pixels.nbytes > 0 and self._descriptor >= 0 and not self.is_too_large(pixels)
            start = self._make_room(num_bytes) if may_hold else None
            if start is None:
                return None
            entry = _Entry(media_hash, self._name_place(start, pixels), num_bytes)
            self._write(entry.place, pixels)
            self._entries.append(entry)
            self._index[media_hash] = entry
            self._num_held_bytes += entry.num_bytes
            self._next_start = entry.end
            return entry.place

    def is_too_large(self, pixels: Pixels) -> bool:
        """Return whether there is never room for so many bytes."""
        return pixels.nbytes > self._max_object_bytes or _entry_bytes(pixels) > self.num_bytes - _FIRST

    def size(self) -> CacheSize:
        with self._lock:
            return CacheSize(self._num_held_bytes, self.num_bytes, len(self._index), self.num_evictions)

    def drop(self, media_hash: str) -> None:
        """Invalidate an entry. A reader of it finds out afterwards."""
        with self._lock:
            if entry := self._index.get(media_hash):
                self._invalidate(entry)
                self._forget(entry)

    def clear(self) -> None:
        with self._lock:
            for entry in tuple(self._index.values()):
                self._invalidate(entry)
                self._forget(entry)

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                _path_of(self._directory, self._ring_id).unlink(missing_ok=True)
                # Reset first: if this were interrupted, the next call would close whatever has the number by then.
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)
            self._reader.close()
            self._entries.clear()
            self._index.clear()
            self._num_held_bytes = 0

    def _forget(self, entry: _Entry) -> None:
        del self._index[entry.media_hash]
        self._num_held_bytes -= entry.num_bytes

    def _make_room(self, num_bytes: int) -> int | None:
        """Return where `num_bytes` may be written; None if an entry there is being read."""
        start = self._next_start
        if start + num_bytes > self.num_bytes:
            # The rest of the file stays empty; the entries there are the oldest.
            if not self._evict(start, self.num_bytes):
                return None
            start = _FIRST
        return start if self._evict(start, start + num_bytes) else None

    def _evict(self, start: int, end: int) -> bool:
        """Evict the oldest entries as long as they overlap the interval; False if one of them is being read."""
        while self._entries and self._entries[0].start < end and start < self._entries[0].end:
            if not self._try_take_back(self._entries[0]):
                return False
            entry = self._entries.popleft()
            if self._index.get(entry.media_hash) is entry:
                self._forget(entry)
                self.num_evictions += 1
        return True

    def _try_take_back(self, entry: _Entry) -> bool:
        with _count_lock(self._descriptor, entry.place) as is_held:
            if not is_held or self._is_being_read(entry.place):
                return False
            self._invalidate(entry)
            return True

    def _is_being_read(self, place: RingPlace) -> bool:
        if not _count_of(self._descriptor, place):
            return False
        with _reading_lock(self._descriptor, place, is_shared=False) as is_held:
            return not is_held

    def _invalidate(self, entry: _Entry) -> None:
        os.pwrite(self._descriptor, bytes(_HEADER_BYTES), entry.start)

    def _name_place(self, start: int, pixels: Pixels) -> RingPlace:
        entry_id, self._next_id = self._next_id, self._next_id % _LAST_ID + 1
        shape = shape_of(pixels)
        signature = _sign(self._key, self._ring_id, entry_id, start, pixels.nbytes, shape)
        return RingPlace(self._ring_id, entry_id, start, pixels.nbytes, shape, signature)

    def _write(self, place: RingPlace, pixels: Pixels) -> None:
        object_bytes = _HEADER_BYTES - _ENTRY.size + place.num_bytes
        header = _HEADER.pack(place.entry_id, object_bytes, 0, place.signature, *place.shape)
        payload = np.ascontiguousarray(pixels).data.cast("B")
        parts: list[bytes | memoryview] = [header.ljust(_HEADER_BYTES, b"\0"), payload]
        written = os.pwritev(self._descriptor, parts, place.offset)
        assert written == _HEADER_BYTES + place.num_bytes, "all of the file is there"

    def check_invariants(self) -> None:
        with self._lock:
            starts = [entry.start for entry in self._entries]
            assert sum(after < before for before, after in pairwise(starts)) <= 1, "they go round more than once"
            by_start = sorted(self._entries, key=lambda entry: entry.start)
            assert all(before.end <= after.start for before, after in pairwise(by_start))
            for entry in by_start:
                assert _FIRST <= entry.start < entry.end <= self.num_bytes
                is_known = self._index.get(entry.media_hash) is entry
                assert is_known == (_count_of(self._descriptor, entry.place) is not None)
            assert all(self._index[entry.media_hash] in self._entries for entry in self._index.values())
            assert self._num_held_bytes == sum(entry.num_bytes for entry in self._index.values())
            assert self._descriptor < 0 or os.fstat(self._descriptor).st_blocks * 512 >= self.num_bytes


class RingReader:
    """Reads from whichever ring a place names; shared by threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ring: _MappedRing | None = None

    def read(self, place: RingPlace) -> Pixels | None:
        """Return a copy of the pixels at `place`; None if the place is stale or was never given out."""
        if not _RING_ID.fullmatch(place.ring_id):
            return None
        try:
            # Opened for each read, as threads that read at the same time must hold separate locks.
            with opened(_path_of(self._directory, place.ring_id), os.O_RDWR) as descriptor:
                ring = self._map(descriptor, place.ring_id)
                return _read(descriptor, ring.content, place) if ring.is_authentic(place) else None
        except OSError:
            # There is no such ring, or the file is not a ring.
            return None

    def close(self) -> None:
        self._ring = None

    def _map(self, descriptor: int, ring_id: str) -> "_MappedRing":
        """Return the mapped ring. It is kept, as a new map would fault in all pages again.

        There is one writer, and so one ring at a time.
        """
        ring = self._ring
        if ring is None or ring.ring_id != ring_id:
            if os.fstat(descriptor).st_size < _FIRST:
                raise FileNotFoundError(f"{ring_id} is not a ring")
            content = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
            magic, key = _FILE.unpack(content[: _FILE.size].tobytes())
            self._ring = ring = _MappedRing(ring_id, magic, key, content)
        return ring


@dataclass(frozen=True, slots=True)
class _MappedRing:
    ring_id: str
    magic: bytes
    key: bytes
    content: npt.NDArray[np.uint8]

    def is_authentic(self, place: RingPlace) -> bool:
        signature = _sign(self.key, place.ring_id, place.entry_id, place.offset, place.num_bytes, place.shape)
        return self.magic == _MAGIC and compare_digest(place.signature, signature)


def remove_dead_rings(directory: Path) -> None:
    """Remove rings whose writers have ended. A ring is locked from the moment that it has a name until then."""
    for path in directory.glob(f"{_PREFIX}*"):
        # Another process may be faster, or the writer is alive.
        with suppress(FileNotFoundError, BlockingIOError), opened(path, os.O_RDWR) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            # A reader may still have it mapped: its pages read as zeros from now on, and their memory is freed.
            with mmap.mmap(descriptor, 0) as content:
                content.madvise(mmap.MADV_REMOVE)


def _entry_bytes(pixels: Pixels) -> int:
    return _HEADER_BYTES + -(-pixels.nbytes // _UNIT) * _UNIT


def _path_of(directory: Path, ring_id: str) -> Path:
    return directory / f"{_PREFIX}{ring_id}"


def _sign(key: bytes, *parts: object) -> bytes:
    """Sign a place. Signatures cannot be made without the key, so pixels that look like an entry never become one."""
    return blake2b(repr(parts).encode(), key=key, digest_size=16).digest()


def _read(descriptor: int, content: npt.NDArray[np.uint8], place: RingPlace) -> Pixels | None:
    start = place.offset + _HEADER_BYTES
    with _reading_lock(descriptor, place, is_shared=True) as is_held:
        if not is_held or not _change_count(descriptor, place, 1):
            return None
        pixels = content[start : start + place.num_bytes].reshape(place.shape).copy()
        return pixels if _change_count(descriptor, place, -1) else None


def _change_count(descriptor: int, place: RingPlace, by: int) -> bool:
    """Add `by` to the reference count; return False and change nothing if something else lies there."""
    with _count_lock(descriptor, place, patience=_PATIENCE_SECONDS) as is_held:
        count = _count_of(descriptor, place) if is_held else None
        if count is None:
            return False
        os.pwrite(descriptor, _COUNT.pack(count + by), place.offset + _ENTRY.size)
        return True


def _count_of(descriptor: int, place: RingPlace) -> int | None:
    """Return the reference count; None if something else lies there."""
    header = os.pread(descriptor, _HEADER_BYTES, place.offset)
    entry_id, _, count, signature, *_ = _HEADER.unpack_from(header)
    return int(count) if entry_id == place.entry_id and compare_digest(signature, place.signature) else None


def _count_lock(descriptor: int, place: RingPlace, patience: float = 0) -> AbstractContextManager[bool]:
    return try_lock(descriptor, _LOCKS + 2 * place.entry_id, patience=patience)


def _reading_lock(descriptor: int, place: RingPlace, *, is_shared: bool) -> AbstractContextManager[bool]:
    return try_lock(descriptor, _LOCKS + 2 * place.entry_id + 1, is_shared=is_shared)
