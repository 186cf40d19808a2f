"""What the header of a picture may cost, checked before and while Pillow reads it.

Headers are read in the frontend, and Pillow's parsers have no end but the file's: each of millions of empty segments is
a turn of Python's interpreter, a few kilobytes unpack to gigabytes.  Here is what no real picture has, by far.
Knows where costly parts lie, not what they mean: whatever else is wrong with a header is left for Pillow to say.
"""

import io
import struct
from collections.abc import Callable, Iterator

from PIL import Image

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.png_chunks import chunks_of

# By which a parser comes to an end: a segment, a chunk or a tag takes one to four, a stray byte one.
MAX_READS = 2**14
# Of a JPEG 2000's header, its colour profile included: it is read at once, and then walked through.
MAX_JP2_BYTES = 2**22
# Each is added to a copy of those before.
MAX_EXIF_SEGMENTS = 16
MAX_EXIF_BYTES = 2**22
# Tables that tell how a JPEG is coded have some hundred bytes, and become objects of 30 times the size.
MAX_TABLE_BYTES = 2**16
MAX_PHOTOSHOP_BLOCKS = 2**14
# With pixels in pieces of 512 bytes, one of 64 MiB has as many.
MAX_CHUNKS = 2**17
# Pillow unpacks no more of one chunk, and deflate makes no more of one byte.
_UNPACKED_CHUNK, _UNPACKED_BYTE = 2**20, 1032
MAX_UNPACKED_BYTES = 128 * _UNPACKED_CHUNK
# Of what a TIFF lists, such as the places of its strips.
MAX_TIFF_VALUE_BYTES = 2**19

_EXIF = b"Exif\0\0"
_START_OF_SCAN, _APP1, _APP13 = 0xDA, 0xE1, 0xED
_TABLES = range(0xC0, 0xE0)
# Markers that no length follows, as Pillow has it.
_BARE = frozenset((0x00, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))
# Bytes of a value, by its type; texts and bytes, which stay as they are, not among them.
_TIFF_VALUES = {3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}


class CountedFile(io.BytesIO):
    """Refuses to be read more often than a header can need, whichever parser it is."""

    def __init__(self, data: bytes, format_: str, field: str) -> None:
        super().__init__(data)
        self._field = field
        # To tell whether another frame follows, the blocks of the first are passed: they have 255 bytes, most of them.
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
    """Before Pillow looks at it."""
    if format_ in _CHECKS:
        _CHECKS[format_](data, field)


def check_exif(image: Image.Image, field: str) -> None:
    """Before it is taken apart."""
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
    """The marker of each, and where its content begins and ends: those that Pillow comes to before its reads end."""
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
        # What would not fit into the file Pillow leaves out.
        _check("bytes of numbers in one tag", size if size <= len(data) else 0, MAX_TIFF_VALUE_BYTES, field)


def _tags(data: bytes) -> Iterator[tuple[int, int]]:
    """The type of each tag of the first frame, and how many values it has."""
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
