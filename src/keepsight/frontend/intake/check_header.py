"""Limits on the cost of parsing a picture's header, checked before and while Pillow reads it.

Headers are parsed in the frontend, and Pillow's parsers stop only at the end of the file: each of millions of empty
segments costs an iteration in Python, and a few kilobytes can expand to gigabytes. No real picture comes near the
limits. This module knows where costly parts are, not what they mean: Pillow reports any other fault of a header.
"""

import io
import struct
from collections.abc import Callable, Iterator

from PIL import Image

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.png_chunks import chunks_of

# Reads after which a parser is stopped: a segment, a chunk or a tag takes one to four, a stray byte one.
MAX_READS = 2**14
# For a JPEG 2000 header, including its color profile: Pillow reads it in one call, then walks through it.
MAX_JP2_BYTES = 2**22
# Pillow copies all earlier EXIF segments to append the next one.
MAX_EXIF_SEGMENTS = 16
MAX_EXIF_BYTES = 2**22
# A JPEG's coding tables have a few hundred bytes; parsed, they become objects of 30 times the size.
MAX_TABLE_BYTES = 2**16
MAX_PHOTOSHOP_BLOCKS = 2**14
# A PNG of 64 MiB has this many if its pixels are split into chunks of 512 bytes.
MAX_CHUNKS = 2**17
# The most bytes that Pillow decompresses from one chunk, and that deflate expands one byte to.
_UNPACKED_CHUNK, _UNPACKED_BYTE = 2**20, 1032
MAX_UNPACKED_BYTES = 128 * _UNPACKED_CHUNK
# For the values of one TIFF tag, such as the offsets of the strips.
MAX_TIFF_VALUE_BYTES = 2**19

_EXIF = b"Exif\0\0"
_START_OF_SCAN, _APP1, _APP13 = 0xDA, 0xE1, 0xED
_TABLES = range(0xC0, 0xE0)
# Markers without a length field, according to Pillow.
_BARE = frozenset((0x00, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))
# Bytes per value by TIFF type; without text and bytes, which are not converted.
_TIFF_VALUES = {3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}


class CountedFile(io.BytesIO):
    """A file that refuses to be read more often than any header needs, whichever parser reads it."""

    def __init__(self, data: bytes, format_: str, field: str) -> None:
        super().__init__(data)
        self._field = field
        # To find out whether a second frame follows, Pillow skips the blocks of the first, most of them of 255 bytes.
        self._max_reads = self._reads_left = MAX_READS + (len(data) // 64 if format_ == "GIF" else 0)
        self._max_bytes = MAX_JP2_BYTES if format_ == "JPEG2000" else len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise UnreadablePictureError(self._field, f"its header takes more than {self._max_reads} reads")
        content = super().read(size)
        if len(content) > self._max_bytes:
            raise UnreadablePictureError(self._field, f"its header has more than {self._max_bytes} bytes")
        return content


def check_header(data: bytes, format_: str, field: str) -> None:
    """Refuse a header that is too costly to parse. Call this before Pillow opens the file."""
    if format_ in _CHECKS:
        _CHECKS[format_](data, field)


def check_exif(image: Image.Image, field: str) -> None:
    """Refuse EXIF data that is too large. Call this before it is parsed."""
    for name in ("exif", "Raw profile type exif"):
        _check("bytes of EXIF", len(image.info.get(name) or ""), MAX_EXIF_BYTES, field)


def _check_jpeg(data: bytes, field: str) -> None:
    num_exif = num_table_bytes = num_blocks = 0
    for marker, begin, end in _segments(data):
        num_exif += marker == _APP1 and data.startswith(_EXIF, begin)
        num_table_bytes += end - begin if marker in _TABLES else 0
        num_blocks += data.count(b"8BIM", begin, end) if marker == _APP13 else 0
    _check("EXIF segments", num_exif, MAX_EXIF_SEGMENTS, field)
    _check("bytes of tables", num_table_bytes, MAX_TABLE_BYTES, field)
    _check("blocks of Photoshop's", num_blocks, MAX_PHOTOSHOP_BLOCKS, field)


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each segment's marker and the bounds of its content, as far as Pillow gets within its reads."""
    position = 2
    for _ in range(MAX_READS):
        position = data.find(b"\xff", position)
        if position < 0 or position + 4 > len(data):
            return
        marker = data[position + 1]
        if marker == _START_OF_SCAN:
            return
        if marker == 0xFF:
            position += 1
        elif marker in _BARE:
            position += 2
        else:
            begin = position + 4
            position = max(begin, position + 2 + int.from_bytes(data[position + 2 : begin]))
            yield marker, begin, min(position, len(data))


def _check_png(data: bytes, field: str) -> None:
    num_unpacked = 0
    for index, (kind, place) in enumerate(chunks_of(data)):
        _check("chunks", index, MAX_CHUNKS, field)
        if kind in (b"iCCP", b"zTXt", b"iTXt"):
            num_unpacked += min(_UNPACKED_CHUNK, _UNPACKED_BYTE * (place.stop - place.start))
    _check("bytes of packed metadata", num_unpacked, MAX_UNPACKED_BYTES, field)


def _check_tiff(data: bytes, field: str) -> None:
    for kind, num_values in _tags(data):
        size = num_values * _TIFF_VALUES.get(kind, 0)
        # Pillow ignores values that would not fit into the file.
        _check("bytes of numbers in one tag", size if size <= len(data) else 0, MAX_TIFF_VALUE_BYTES, field)


def _tags(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the type and the number of values of each tag of the first frame."""
    order = "<" if data.startswith(b"II") else ">"
    at, head, entry = (8, "QQ", "2xHQ8x") if data[2] == 43 else (4, "IH", "2xHI4x")
    try:
        (first,) = struct.unpack_from(order + head[0], data, at)
        (num_tags,) = struct.unpack_from(order + head[1], data, first)
    except (struct.error, OverflowError):
        return
    begin, size = first + struct.calcsize("<" + head[1]), struct.calcsize("<" + entry)
    num_whole = min(num_tags, MAX_READS, max(0, len(data) - begin) // size)
    yield from struct.iter_unpack(order + entry, data[begin : begin + num_whole * size])


def _check(what: str, number: int, most: int, field: str) -> None:
    if number > most:
        raise UnreadablePictureError(field, f"its header has more than {most} {what}")


_CHECKS: dict[str, Callable[[bytes, str], None]] = {"JPEG": _check_jpeg, "PNG": _check_png, "TIFF": _check_tiff}
