import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, JpegImagePlugin

from keepsight.errors import PictureError, UnreadablePictureError
from keepsight.frontend.intake import check_header, read_header
from keepsight.frontend.intake.open_picture import exif_of, open_picture, open_to_decode
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.media import Geometry
from tests.frontend.sample_pictures import ENCODINGS, encode, random_picture

SIZE = (17, 13)
JPEG = encode(random_picture("RGB", SIZE), "JPEG")
PNG = encode(random_picture("RGB", SIZE), "PNG")
GIF = encode(random_picture("P", SIZE), "GIF")
JP2 = encode(random_picture("RGB", SIZE), "JPEG2000")
J2K = encode(random_picture("RGB", SIZE), "JPEG2000", no_jp2=True)
PACKED_MEBIBYTE = zlib.compress(bytes(2**20), 9)


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(content)) + content


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def box(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def inserted(data: bytes, position: int, *pieces: bytes) -> bytes:
    return data[:position] + b"".join(pieces) + data[position:]


def jpeg(*pieces: bytes) -> bytes:
    return inserted(JPEG, 2, *pieces)


def png(*pieces: bytes) -> bytes:
    return inserted(PNG, 33, *pieces)


def png_with_late(*pieces: bytes) -> bytes:
    return inserted(PNG, len(PNG) - 12, *pieces)


def tiff_of_strips(num_strips: int) -> bytes:
    tags = ((256, 3, 1, 1), (257, 4, 1, num_strips), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1))
    places = ((273, 4, num_strips, 200), (278, 3, 1, 1))
    head = b"II*\0" + struct.pack("<IH", 8, len(tags) + len(places))
    directory = b"".join(struct.pack("<HHII", *tag) for tag in (*tags, *places))
    return (head + directory).ljust(200, b"\0") + bytes(5 * num_strips)


def tiff_of_tags(num_tags: int) -> bytes:
    tags = b"".join(struct.pack("<HHII", 1000 + index, 3, 1, 1) for index in range(num_tags))
    return b"II*\0" + struct.pack("<IH", 8, num_tags) + tags + bytes(4)


def jp2_of_header(*pieces: bytes) -> bytes:
    at = JP2.index(b"jp2h") - 4
    length = int.from_bytes(JP2[at : at + 4])
    return JP2[:at] + box(b"jp2h", b"".join((JP2[at + 8 : at + length], *pieces))) + JP2[at + length :]


EXIF = b"Exif\0\0"
PHOTOSHOP = b"Photoshop 3.0\0" + (b"8BIM\4\4\0\0" + bytes(4)) * 5000
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "JPEG of EXIF": (lambda: jpeg(*[segment(0xE1, EXIF)] * 17), "16 EXIF segments"),
    "JPEG of empty segments": (lambda: jpeg(segment(0xEF, b"") * 6000), "16384 reads"),
    "JPEG of fill bytes": (lambda: jpeg(b"\xff" * 20_000), "16384 reads"),
    "JPEG of stray bytes": (lambda: jpeg(segment(0xEF, b""), b"\1" * 20_000), "16384 reads"),
    "JPEG of tables": (lambda: jpeg(segment(0xDB, bytes(65) * 900) * 2), "65536 bytes of tables"),
    "JPEG of components": (
        lambda: jpeg(segment(0xC0, b"\x08\0\x0d\0\x11\x03" + bytes(60_000)) * 2),
        "65536 bytes of tables",
    ),
    "JPEG of Photoshop's": (lambda: jpeg(segment(0xED, PHOTOSHOP) * 4), "16384 blocks"),
    "PNG of empty chunks": (lambda: png(chunk(b"abCd") * 9000), "16384 reads"),
    "PNG of profiles": (lambda: png(chunk(b"iCCP", b"a\0\0" + PACKED_MEBIBYTE) * 129), "bytes of packed metadata"),
    "PNG of texts": (lambda: png(chunk(b"zTXt", b"\0\0" + PACKED_MEBIBYTE) * 129), "bytes of packed metadata"),
    "PNG of late texts": (lambda: png_with_late(chunk(b"tEXt", b"a\0b") * 6000), "16384 reads"),
    "PNG of late chunks": (lambda: png_with_late(chunk(b"abCd") * 140_000), "131072 chunks"),
    "PNG of EXIF": (lambda: png(chunk(b"eXIf", bytes(2**22))), "4194304 bytes of EXIF"),
    "PNG of late EXIF": (lambda: png_with_late(chunk(b"eXIf", bytes(2**22))), "4194304 bytes of EXIF"),
    "PNG of EXIF as text": (
        lambda: png(chunk(b"tEXt", b"Raw profile type exif\0" + b"\n" * (2**22 + 1))),
        "4194304 bytes of EXIF",
    ),
    "TIFF of strips": (lambda: tiff_of_strips(140_000), "524288 bytes of numbers"),
    "TIFF of tags": (lambda: tiff_of_tags(20_000), "16384 reads"),
    "GIF of comments": (lambda: inserted(GIF, GIF.index(b","), b"!\xfe\1a\0" * 10_000), "reads"),
    "GIF of nothing after its frame": (lambda: inserted(GIF, len(GIF) - 1, bytes(20_000)), "reads"),
    "JPEG 2000 of boxes": (lambda: inserted(JP2, 12, box(b"free") * 20_000), "16384 reads"),
    "JPEG 2000 of boxes inside": (lambda: jp2_of_header(box(b"free") * 2**19), "4194304 bytes"),
    "JPEG 2000 of segments": (
        lambda: inserted(J2K, 4 + int.from_bytes(J2K[4:6]), b"\xff\x30\0\2" * 10_000),
        "16384 reads",
    ),
    "PPM of a comment": (lambda: b"P6 #" + b"a" * 20_000 + b"\n17 13 255\n" + bytes(663), "16384 reads"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_costs_too_much_is_refused_and_the_limit_is_named(name: str) -> None:
    make, limit = BOMBS[name]
    with pytest.raises(UnreadablePictureError, match=f"picture: its header (takes|has) more than .*{limit}"):
        read_geometry(make(), "picture")


PHOTOGRAPHS: dict[str, Callable[[], bytes]] = {
    "a profile in as many segments as may be": lambda: jpeg(
        *[segment(0xE2, b"ICC_PROFILE\0" + bytes([number, 255]) + bytes(65_000)) for number in range(1, 256)]
    ),
    "extended XMP with a depth map": lambda: jpeg(
        *[segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + bytes(65_000))] * 150
    ),
    "a large note of the maker's, and a preview": lambda: jpeg(segment(0xE1, EXIF + bytes(65_000)) * 3),
    "what Photoshop keeps": lambda: jpeg(segment(0xED, PHOTOSHOP)),
    "a header that is filled up": lambda: jpeg(b"\xff" * 8000),
    "pixels in many small pieces": lambda: PNG[:33] + chunk(b"IDAT") * 100_000 + PNG[33:],
    "a text for each step that made it": lambda: png(chunk(b"tEXt", b"a\0" + bytes(1000)) * 5000),
    "a profile and the same in packed texts": lambda: png(
        chunk(b"iCCP", b"a\0\0" + PACKED_MEBIBYTE), chunk(b"zTXt", b"a\0\0" + PACKED_MEBIBYTE) * 50
    ),
    "a workflow of megabytes": lambda: png(chunk(b"iTXt", b"a\0\0\0\0\0" + b" " * 2**24)),
    "a profile of megabytes in a JPEG 2000": lambda: jp2_of_header(box(b"free", bytes(2**21))),
}


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_what_real_pictures_have_is_let_through(name: str) -> None:
    assert read_geometry(PHOTOGRAPHS[name](), "picture") == Geometry(*SIZE)


def test_a_tiff_may_have_a_strip_for_each_row() -> None:
    assert read_geometry(tiff_of_strips(65_535), "picture") == Geometry(1, 65_535)


def test_a_large_gif_of_one_frame_is_read_to_its_end() -> None:
    rng = np.random.default_rng(0)
    gif = encode(Image.fromarray(rng.integers(0, 256, (1500, 1500), dtype=np.uint8)), "GIF")
    # More reads than other headers may take.
    assert len(gif) // 128 > check_header.MAX_READS
    assert read_geometry(gif, "picture") == Geometry(1500, 1500)


def outcome_of(data: bytes, open_: Callable[[bytes, str], ImageFile.ImageFile] = open_picture) -> object:
    try:
        geometry = read_geometry(data, "image")
        return geometry, dict(exif_of(open_(data, "image"), data, "image"))
    except PictureError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, on damaged TIFF and EXIF
@pytest.mark.parametrize("encoding", [*ENCODINGS, "jpeg 2000", "mpo"])
def test_ordinary_and_damaged_pictures_are_read_as_without_limits(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = random_picture("RGB", SIZE)
    others = {"jpeg 2000": JP2, "mpo": encode(frame, "MPO", save_all=True, append_images=[frame])}
    original = others[encoding] if encoding in others else ENCODINGS[encoding](SIZE)
    rng = np.random.default_rng(0)
    pictures = [original]
    for _ in range(60):
        damaged = bytearray(original)
        for position in rng.integers(0, min(len(damaged), 700), 3):
            damaged[position] = rng.integers(0, 256)
        pictures.append(bytes(damaged))
    outcomes = [outcome_of(each) for each in pictures]

    def without_limits(data: bytes, _field: str) -> ImageFile.ImageFile:
        return open_to_decode(data)

    monkeypatch.setattr(read_header, "open_picture", without_limits)
    assert outcomes == [outcome_of(each, without_limits) for each in pictures]


@given(
    st.lists(
        st.sampled_from([b"\xff", b"\0", b"\1", b"\3", b"\xe1", b"\xd0", b"\xc8", b"\xf0", b"\xda"])
        | st.sampled_from([segment(0xE1, b"Exif\0\0a"), segment(0xED, b""), segment(0xFE, b"\xff"), b"\xff\xe0\0\0"])
    )
)
def test_the_segments_of_a_jpeg_are_those_that_pillow_finds(pieces: list[bytes]) -> None:
    data = jpeg(*pieces)
    try:
        found = JpegImagePlugin.JpegImageFile(io.BytesIO(data)).applist
    except (SyntaxError, OSError):
        return
    is_kept = {*range(0xE0, 0xF0), 0xFE}
    assert [data[begin:end] for marker, begin, end in check_header._segments(data) if marker in is_kept] == [
        content for _, content in found
    ]
