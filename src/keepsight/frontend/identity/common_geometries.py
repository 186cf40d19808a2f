"""Geometries of pictures, films and sounds by given name, for all frontends of a server and those that start later.

A table in shared memory, in which a name has one of the few places of its bucket: the last names of each bucket are
kept, and other names' pictures have to be sent again. Lock-free; an entry that is read while it is written counts as
absent, and of two names that are put into one bucket at the same moment one may be lost.
"""

import logging
import mmap
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from blake3 import blake3

from keepsight.media import Geometry, Timeline
from keepsight.observe.shared_page import open_shared_page

logger = logging.getLogger(__name__)
FILE = "geometries"
# In 3 MiB, as some machines have little shared memory. Of 20,000 names about one in a thousand lacks a place.
NUM_PLACES = 2**16
# With so many, few buckets overflow while less than a third of the table is full.
PLACES_PER_BUCKET = 8
# Digest of the name, width, height, samples of a sound, frames and frames per second, 0 where there are none, the
# second at which it was put here, and whether it is proven; then a checksum of these.
_ENTRY, _CHECKSUM = struct.Struct("<16sIIIIdI?"), struct.Struct("<I")
PLACE_BYTES = _ENTRY.size + _CHECKSUM.size
_DIGEST_BYTES = 16
_Entry = tuple[bytes, int, int, int, int, float, int, bool]


class Known(NamedTuple):
    geometry: Geometry
    # Whether pixels of this geometry were made under the name.
    is_proven: bool


class CommonGeometries:
    def __init__(
        self,
        page: mmap.mmap | bytearray,
        num_places: int = NUM_PLACES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._page, self._clock = page, clock
        self._num_buckets = num_places // PLACES_PER_BUCKET

    @classmethod
    def open(cls, run_directory: Path) -> Self | None:
        """Open the table, or return None if that fails: then each frontend knows only the media sent to itself."""
        try:
            return cls(open_shared_page(run_directory, FILE, NUM_PLACES * PLACE_BYTES))
        except OSError as error:
            logger.warning("only the frontend that was sent a picture will know its uuid: %s", error)
            return None

    def get(self, name: str) -> Known | None:
        for _, entry in self._find(*self._locate(name)):
            _, width, height, num_samples, num_frames, frames_per_second, _, is_proven = entry
            timeline = Timeline(num_frames, frames_per_second) if num_frames else None
            return Known(Geometry(width, height, timeline, num_samples), is_proven)
        return None

    def put(self, name: str, geometry: Geometry, *, is_proven: bool = False) -> None:
        """Keep a geometry for all frontends, unless it is that of chosen frames of a film."""
        digest, places = self._locate(name)
        place = next((own for own, _ in self._find(digest, places)), None)
        if place is None:
            place = min(places, key=self._put_at)
        timeline = geometry.timeline or Timeline(0, 0.0)
        if timeline.excerpt is not None:  # no place has room for its numbers
            return
        frames = (timeline.num_frames, timeline.frames_per_second)
        size = (geometry.width, geometry.height, geometry.num_samples)
        entry = _ENTRY.pack(digest, *size, *frames, int(self._clock()), is_proven)
        self._page[place : place + PLACE_BYTES] = entry + _CHECKSUM.pack(zlib.crc32(entry))

    def forget_unproven(self, name: str) -> None:
        """Forget a name, unless any frontend has proven it."""
        # Two processes may have put it at the same moment.
        found = list(self._find(*self._locate(name)))
        if any(is_proven for _, (*_, is_proven) in found):
            return
        for place, _ in found:
            self._page[place : place + PLACE_BYTES] = bytes(PLACE_BYTES)

    def _locate(self, name: str) -> tuple[bytes, range]:
        """Return the name's digest, and the places of its bucket."""
        digest, bucket_bytes = blake3(name.encode()).digest(_DIGEST_BYTES), PLACES_PER_BUCKET * PLACE_BYTES
        begin = int.from_bytes(digest[:8], "little") % self._num_buckets * bucket_bytes
        return digest, range(begin, begin + bucket_bytes, PLACE_BYTES)

    def _find(self, digest: bytes, places: range) -> Iterator[tuple[int, _Entry]]:
        """Yield the places that hold a name, each with its entry as read at one moment: others may write there."""
        for place in places:
            entry = self._read(place)
            if entry is not None and entry[0] == digest:
                yield place, entry

    def _put_at(self, place: int) -> int:
        """Return the second at which a place was written, 0 if it is free."""
        entry = self._read(place)
        return 0 if entry is None else entry[-2]

    def _read(self, place: int) -> _Entry | None:
        """Return a place's entry; None if it is free, or being written."""
        entry = self._page[place : place + _ENTRY.size]
        [checksum] = _CHECKSUM.unpack_from(self._page, place + _ENTRY.size)
        # The bytes of a free place are all 0, of which the checksum is not.
        return _ENTRY.unpack(entry) if checksum == zlib.crc32(entry) else None
