"""Reads the chunks of a PNG: enough to find metadata after the pixels, and to tell a plain PNG from a special one."""

import struct
from collections.abc import Iterator

# The pixels, and the chunks that change none of them: neither transparency nor a second frame.
PLAIN_CHUNKS = frozenset(b"IHDR IDAT IEND bKGD cHRM eXIf gAMA iCCP iTXt pHYs sBIT sRGB tEXt tIME zTXt".split())


def with_metadata_first(data: bytes) -> bytes | None:
    """Return the PNG with its metadata first and without its pixels; None if no metadata follows the pixels."""
    kept, has_pixels, has_late_metadata = [data[:8]], False, False
    for kind, chunk in chunks_of(data):
        if kind == b"IDAT":
            has_pixels = True
        elif kind in (b"IHDR", b"PLTE") or (kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt") and chunk.stop <= len(data)):
            has_late_metadata |= has_pixels
            kept.append(data[chunk])
    empty_pixels = struct.pack(">I4sI", 0, b"IDAT", 0x35AF061E)
    return b"".join((*kept, empty_pixels)) if has_late_metadata else None


def is_plain_png(data: bytes) -> bool:
    """Return whether it is complete, 8-bit gray, RGB or RGBA, not interlaced, and without chunks that change pixels."""
    depth, colour, _, _, interlacing = data[24:29]
    if depth != 8 or colour not in (0, 2, 6) or interlacing != 0:
        return False
    for kind, chunk in chunks_of(data):
        if kind not in PLAIN_CHUNKS or chunk.stop > len(data):
            return False
        if kind == b"IEND":
            return True
    return False


def chunks_of(data: bytes) -> Iterator[tuple[bytes, slice]]:
    """Yield the kind and the position of each chunk; the last may end beyond the data."""
    position = 8
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        yield kind, slice(position, position + 12 + length)
        position += 12 + length
