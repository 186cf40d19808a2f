"""The byte format of an entry, in any tier: a header that describes the array, then the array.

Invariant: an entry is read as it was written under that key, or DamagedEntryError is raised: the checksum covers every
byte, and truncated or foreign entries, or those of another version or key, are detected. The checksum only detects
damage: anyone who can write entries could also write a valid one, of whatever kind.
"""

import math
import struct
from collections.abc import Callable, Iterator

import numpy as np
from xxhash import xxh3_128

from keepsight.errors import KeepsightError
from keepsight.tiers.tier import StoredArray

# Magic with the version; checksum of all that follows; key; dtype; seconds; bytes; rank; shape.
_HEADER = struct.Struct("<8s16s32s16sdQB7x8Q")
_MAGIC = b"KSEMBED2"
_CHECKED_FROM = len(_MAGIC) + 16
_MAX_RANK = 8
# Padded so that the array is aligned.
HEADER_BYTES = 256

# Fills part of the buffer it is given, and returns the number of bytes read; 0 at the end.
ReadInto = Callable[[memoryview], int]


class DamagedEntryError(KeepsightError):
    """The bytes are not an entry that was written under this key."""


def pack_header(key: str, array: StoredArray) -> bytes:
    assert array.is_whole, f"{array.dtype} {array.shape} does not have {array.num_bytes} bytes"
    assert len(array.shape) <= _MAX_RANK, array.shape
    shape = (*array.shape, *(0 for _ in range(_MAX_RANK - len(array.shape))))
    fields = (bytes.fromhex(key), array.dtype.encode(), array.seconds, array.num_bytes, len(array.shape))
    header = _HEADER.pack(_MAGIC, bytes(16), *fields, *shape).ljust(HEADER_BYTES, b"\0")
    hasher = xxh3_128(header[_CHECKED_FROM:])
    hasher.update(array.payload)
    return _MAGIC + hasher.digest() + header[_CHECKED_FROM:]


def read_seconds(key: str, header: bytes) -> float | None:
    """Return the time the entry took to compute, from its header alone, unverified; None if it is not that key's."""
    if len(header) < HEADER_BYTES:
        return None
    magic, _, found, _, seconds, *_ = _HEADER.unpack_from(header)
    return seconds if magic == _MAGIC and found.hex() == key and 0 <= seconds < math.inf else None


def read_entry(key: str, num_bytes: int, read_into: ReadInto) -> StoredArray:
    """Read an entry. `num_bytes` is the size of all that there is to read."""
    if num_bytes < HEADER_BYTES:
        raise DamagedEntryError(f"{num_bytes} bytes are not an entry")
    header = memoryview(bytearray(HEADER_BYTES))
    for _ in _pieces_of(header, read_into):
        pass
    _, _, _, _, _, claimed, *_ = _HEADER.unpack_from(header)
    # Both must say so before that much memory is taken: a header may be damaged, and a file may be of any size.
    if num_bytes != HEADER_BYTES + claimed:
        raise DamagedEntryError(f"{num_bytes} bytes are not those of its header")
    # Not zeroed first, which a bytearray would be.
    payload = np.empty(claimed, np.uint8).data
    hasher = xxh3_128(header[_CHECKED_FROM:])
    for piece in _pieces_of(payload, read_into):
        hasher.update(piece)
    if hasher.digest() != header[len(_MAGIC) : _CHECKED_FROM]:
        raise DamagedEntryError("checksum")
    return _as_array(key, header, payload.toreadonly())


def _pieces_of(target: memoryview, read_into: ReadInto) -> Iterator[memoryview]:
    """Fill `target`, yielding what was read: if that is in pieces, each is hashed while the next one arrives."""
    num_read = 0
    while num_read < len(target):
        end = num_read + read_into(target[num_read:])
        if end <= num_read:
            raise DamagedEntryError("it ends too early")
        yield target[num_read:end]
        num_read = end


def _as_array(key: str, header: memoryview, payload: memoryview) -> StoredArray:
    """Parse an undamaged entry. Raises DamagedEntryError if it belongs to another key or version."""
    magic, _, found, dtype, seconds, _, rank, *sizes = _HEADER.unpack_from(header)
    name = dtype.rstrip(b"\0").decode("ascii", "replace")
    array = StoredArray(name, tuple(sizes[:rank]), payload, seconds)
    is_known = magic == _MAGIC and found.hex() == key and rank <= _MAX_RANK and 0 <= seconds < math.inf
    if not is_known or not array.is_whole:
        raise DamagedEntryError("header")
    return array
