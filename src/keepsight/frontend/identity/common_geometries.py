"""Geometries of pictures, films and sounds by given name, for all frontends of a server and those that start later.

A table in shared memory, in which a name has one slot: of two names with the same slot the later is kept, and the
other's picture has to be sent again.  Lock-free; an entry that is read while it is written counts as absent.
"""

import logging
import mmap
import struct
import zlib
from pathlib import Path
from typing import Self

from blake3 import blake3

from keepsight.media import Geometry, Timeline
from keepsight.observe.shared_page import open_shared_page

logger = logging.getLogger(__name__)
FILE = "geometries"
# 176 KiB: some machines have little shared memory.
NUM_PLACES = 2**12
# Digest of the name, width, height, samples of a sound, frames and frames per second, 0 where there are none; then a
# checksum of these.
_ENTRY, _CHECKSUM = struct.Struct("<16sIIIId"), struct.Struct("<I")
PLACE_BYTES = _ENTRY.size + _CHECKSUM.size


class CommonGeometries:
    def __init__(self, page: mmap.mmap | bytearray, num_places: int = NUM_PLACES) -> None:
        self._page, self._num_places = page, num_places

    @classmethod
    def open(cls, run_directory: Path) -> Self | None:
        """Open the table, or return None if that fails: then each frontend knows only the media sent to itself."""
        try:
            return cls(open_shared_page(run_directory / FILE, NUM_PLACES * PLACE_BYTES))
        except OSError as error:
            logger.warning("only the frontend that was sent a picture will know its uuid: %s", error)
            return None

    def get(self, name: str) -> Geometry | None:
        digest, place = self._locate(name)
        entry = self._page[place : place + _ENTRY.size]
        [checksum] = _CHECKSUM.unpack_from(self._page, place + _ENTRY.size)
        held, width, height, num_samples, *frames = _ENTRY.unpack(entry)
        if held != digest or checksum != zlib.crc32(entry):
            return None
        return Geometry(width, height, Timeline(*frames) if frames[0] else None, num_samples)

    def put(self, name: str, geometry: Geometry) -> None:
        digest, place = self._locate(name)
        timeline = geometry.timeline or Timeline(0, 0.0)
        frames = (timeline.num_frames, timeline.frames_per_second)
        entry = _ENTRY.pack(digest, geometry.width, geometry.height, geometry.num_samples, *frames)
        self._page[place : place + PLACE_BYTES] = entry + _CHECKSUM.pack(zlib.crc32(entry))

    def forget(self, name: str) -> None:
        if self.get(name) is not None:
            _, place = self._locate(name)
            self._page[place : place + PLACE_BYTES] = bytes(PLACE_BYTES)

    def _locate(self, name: str) -> tuple[bytes, int]:
        digest = blake3(name.encode()).digest(16)
        return digest, int.from_bytes(digest[:8], "little") % self._num_places * PLACE_BYTES
