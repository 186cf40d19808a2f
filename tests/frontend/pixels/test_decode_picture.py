"""Headers, pixels and refusals; pixels are compared with transformers' `load_image` and `convert_to_rgb`."""

import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from keepsight.errors import PictureError, PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake import read_header
from keepsight.frontend.intake.open_picture import PictureSource, open_picture
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.frontend.pixels import decode_picture as decoder
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.media import MAX_PIXELS, Geometry
from keepsight.requests import Pixels
from tests.frontend.reference_processor import skip_where_the_reference_is_older
from tests.frontend.sample_pictures import (
    ENCODINGS,
    ORIENTATION,
    PIL_MODES,
    SIZES,
    encode,
    encode_turned,
    random_picture,
)

SIZE = (61, 43)
FULL_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")  # The formats that carry an orientation.


def reference_of(source: PictureSource) -> Pixels:
    """Return the pixels that the reference passes to its resize."""
    skip_where_the_reference_is_older()
    from transformers.image_transforms import convert_to_rgb
    from transformers.image_utils import load_image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = load_image(Image.open(io.BytesIO(source))) if isinstance(source, bytes) else source
        pixels: Any = convert_to_rgb(image, return_numpy=True)
    return cast(Pixels, pixels)


def assert_as_the_reference(source: PictureSource) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        geometry, pixels = read_geometry(source, "picture"), decode_picture(source, "picture")
    assert pixels.dtype == np.uint8
    assert pixels.shape == (geometry.height, geometry.width, 3)
    assert np.array_equal(pixels, reference_of(source))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_are_decoded_as_load_image_does(encoding: str) -> None:
    for size in SIZES:
        assert_as_the_reference(ENCODINGS[encoding](size))


@pytest.mark.parametrize("mode", PIL_MODES)
def test_a_pil_image_is_converted_as_the_processor_does(mode: str) -> None:
    assert_as_the_reference(random_picture(mode, SIZE))


def test_transparency_is_dropped_from_bytes_and_shows_white_in_a_pil_image() -> None:
    clear_red = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert decode_picture(encode(clear_red, "PNG"))[0, 0].tolist() == [255, 0, 0]
    assert decode_picture(clear_red)[0, 0].tolist() == [255, 255, 255]


def test_the_transparent_colour_of_a_png_becomes_white() -> None:
    red = Image.new("RGB", (2, 2), (255, 0, 0))
    data = encode(red, "PNG", transparency=(255, 0, 0))
    assert decode_picture(data)[0, 0].tolist() == [255, 255, 255]
    assert_as_the_reference(data)


def test_sixteen_bit_colour_is_what_pillow_makes_of_it() -> None:
    samples = np.random.default_rng(0).integers(0, 65536, (5, 7, 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", 7, 5, 16, 2, 0, 0, 0)
    data = png(chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)))
    assert_as_the_reference(data)
    assert np.array_equal(decode_picture(data), samples >> 8)


@pytest.mark.parametrize("format_", FULL_FORMATS)
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_turned_upright(format_: str, orientation: int) -> None:
    data = encode_turned(random_picture("RGB", SIZE), format_, orientation)
    assert_as_the_reference(data)
    upright = Geometry(43, 61) if 5 <= orientation <= 8 else Geometry(61, 43)
    assert read_geometry(data, "picture") == upright


@pytest.mark.parametrize("format_", ["JPEG", "WEBP"])  # The formats without a checksum over it.
def test_an_orientation_written_as_another_kind_of_number_is_one_too(format_: str) -> None:
    data = encode_turned(random_picture("RGB", SIZE), format_, 6)
    as_short, as_float = struct.pack(">HHIHH", ORIENTATION, 3, 1, 6, 0), struct.pack(">HHIf", ORIENTATION, 11, 1, 6.0)
    assert as_short in data
    data = data.replace(as_short, as_float)
    assert_as_the_reference(data)
    assert read_geometry(data, "picture") == Geometry(43, 61)


def test_an_orientation_given_in_xmp_is_turned_upright() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="6"/></x:xmpmeta>'
    for format_ in ("JPEG", "WEBP", "TIFF"):
        options: dict[str, Any] = {"tiffinfo": {700: xmp}} if format_ == "TIFF" else {"xmp": xmp}
        data = encode(random_picture("RGB", SIZE), format_, **options)
        assert_as_the_reference(data)
        assert read_geometry(data, "picture") == Geometry(43, 61)


def test_a_pil_image_is_taken_as_it_lies() -> None:
    image = Image.open(io.BytesIO(encode_turned(random_picture("RGB", SIZE), "JPEG", 6)))
    assert_as_the_reference(image)
    assert read_geometry(image, "picture") == Geometry(61, 43)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")


def late_metadata() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    content = exif.tobytes()
    profile = f"\nexif\n{len(content):8}\n{content.hex()}\n".encode()
    return {
        "eXIf": chunk(b"eXIf", content.removeprefix(b"Exif\0\0")),
        "zTXt": chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)),
        "iTXt": chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<rdf tiff:Orientation="8"/>'),
    }


@pytest.mark.parametrize("kind", ["eXIf", "zTXt", "iTXt"])
def test_a_png_whose_orientation_follows_its_pixels_is_measured_without_decoding(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(random_picture("RGB", SIZE), "PNG")
    end = data.index(b"IEND") - 4
    data = data[:end] + late_metadata()[kind] + data[end:]
    assert_as_the_reference(data)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda self: pytest.fail("decoded"))
    assert read_geometry(data, "picture") == Geometry(43, 61)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_reading_a_header_decodes_nothing(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    data = ENCODINGS[encoding](SIZE)
    geometry = read_geometry(data, "picture")
    assert {geometry.width, geometry.height} == set(SIZE)
    assert open_picture(data, "picture").format == encoding.split()[0].upper()


def refusal_of(source: PictureSource, max_pixels: int = 10_000_000) -> PictureError:
    """Return the error, which must be the same from the header as from decoding."""
    refusals = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (read_geometry, decode_picture):
            with pytest.raises(PictureError) as caught:
                step(source, "messages[0].content[1]", max_pixels)
            refusals.append(caught.value)
    assert str(refusals[0]) == str(refusals[1])
    assert refusals[0].field == "messages[0].content[1]"
    return refusals[0]


@pytest.mark.parametrize(
    "data", [b"", b"P", b"<svg/>", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"%!PS-Adobe"]
)
def test_bytes_of_no_picture_are_refused_with_their_length(data: bytes) -> None:
    refusal = refusal_of(data)
    assert isinstance(refusal, UnreadablePictureError)
    assert f"{len(data)} bytes" in str(refusal)


def test_damage_that_pillow_has_no_words_for_is_told_by_the_kind_of_its_error() -> None:
    without_palette = png_of_parts(b"\x08\x03", before=chunk(b"tRNS", b"\0"), rows=lambda _: bytes(5 * 8))
    with pytest.raises(UnreadablePictureError, match=r"is damaged or truncated: AssertionError$"):
        decode_picture(without_palette)


def test_a_picture_without_pixels_is_refused() -> None:
    assert "0 x 7" in str(refusal_of(Image.new("RGB", (0, 7))))
    assert "7 x 0" in str(refusal_of(Image.new("RGB", (7, 0))))
    header = struct.pack(">IIBBBBB", 0, 7, 8, 2, 0, 0, 0)
    assert isinstance(refusal_of(png(chunk(b"IHDR", header))), UnreadablePictureError)


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP", "TIFF", "AVIF"])
def test_more_than_one_frame_is_refused(format_: str) -> None:
    frames = [random_picture("RGB", SIZE, seed) for seed in range(3)]
    refusal = refusal_of(encode(frames[0], format_, save_all=True, append_images=frames[1:]))
    assert isinstance(refusal, UnsupportedPictureError)
    assert "more than 1 frame" in str(refusal)


def test_an_mpo_is_the_photograph_at_its_front() -> None:
    frames = [random_picture("RGB", SIZE, seed) for seed in range(2)]
    data = encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert open_picture(data, "picture").format == "MPO"
    assert_as_the_reference(data)


@pytest.mark.parametrize("mode", ["I", "I;16", "F"])
def test_grey_deeper_than_eight_bits_is_refused(mode: str) -> None:
    image = Image.new(mode, SIZE)
    sources: list[PictureSource] = [image, encode(image, "TIFF")]
    for source in sources:
        refusal = refusal_of(source)
        assert isinstance(refusal, UnsupportedPictureError)
        assert mode in str(refusal)
        assert "8 bits" in str(refusal)


def test_premultiplied_gray_is_refused_with_the_mode_to_send_instead() -> None:
    refusal = refusal_of(Image.new("La", SIZE))
    assert isinstance(refusal, UnsupportedPictureError)
    assert "mode La" in str(refusal)
    read_geometry(Image.new("La", SIZE).convert("LA"), "picture")


def test_too_many_pixels_are_refused_with_the_numbers() -> None:
    sources: list[PictureSource] = [Image.new("L", (40, 30)), encode(Image.new("L", (40, 30)), "PNG")]
    for source in sources:
        assert read_geometry(source, "picture", max_pixels=1200)
        refusal = refusal_of(source, max_pixels=1199)
        assert isinstance(refusal, PictureTooLargeError)
        assert refusal.status == 413
        assert "40 x 30 pixels are 1200, at most 1199" in str(refusal)


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_the_warnings_and_errors_of_pillow_about_bombs_do_not_leak(side: int) -> None:
    claimed = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    assert isinstance(refusal_of(png(chunk(b"IHDR", claimed), chunk(b"IDAT", b""))), PictureTooLargeError)
    gif = b"GIF89a" + struct.pack("<HHBBB", side, side, 0, 0, 0) + b"," + struct.pack("<HHHHBB", 0, 0, 1, 1, 0, 2)
    assert isinstance(refusal_of(gif), PictureTooLargeError)


@pytest.mark.parametrize("side", [4000, 14_000, 2**24])
def test_a_webp_that_is_too_large_is_never_opened(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(read_header, "open_picture")
    canvas = b"VP8X" + struct.pack("<II", 10, 0) + (side - 1).to_bytes(3, "little") * 2
    refusal = refusal_of(b"RIFF" + struct.pack("<I", 4 + len(canvas)) + b"WEBP" + canvas)
    assert isinstance(refusal, PictureTooLargeError)
    assert f"{side} x {side} pixels are {side * side}, at most 10000000" in str(refusal)


def test_no_limit_is_named_but_ours() -> None:
    # Its one frame is larger than the GIF's canvas.
    gif = b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0) + b"," + struct.pack("<HHHHBB", 0, 0, 60_000, 60_000, 0, 2)
    refusal = refusal_of(gif)
    assert isinstance(refusal, PictureTooLargeError)
    assert "more than the 10000000 pixels" in str(refusal)


def test_the_most_that_can_be_allowed_is_what_pillow_takes() -> None:
    assert Image.MAX_IMAGE_PIXELS is not None
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS


def test_a_jpeg_cut_anywhere_is_refused_or_is_what_the_reference_makes_of_it() -> None:
    for options in ({}, {"progressive": True}):
        data = encode(random_picture("RGB", SIZE), "JPEG", **options)
        num_refused = 0
        for length in range(len(data)):
            cut = data[:length]
            try:
                expected: Pixels | None = reference_of(cut)
            except Exception:
                expected = None
            if expected is None:
                num_refused += 1
                with pytest.raises(UnreadablePictureError):
                    decode_picture(cut)
            else:
                assert np.array_equal(decode_picture(cut), expected)
        assert num_refused > len(data) - 10


@pytest.mark.parametrize("format_", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_a_picture_cut_in_half_is_refused(format_: str) -> None:
    data = encode(random_picture("RGB", SIZE), format_)
    with pytest.raises(UnreadablePictureError, match=f"{len(data) // 2} bytes"):
        decode_picture(data[: len(data) // 2])


def test_a_damaged_jpeg_is_what_the_reference_makes_of_it() -> None:
    data = bytearray(encode(random_picture("RGB", SIZE), "JPEG"))
    data[-200] ^= 0xFF
    assert_as_the_reference(bytes(data))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, on damaged TIFF and EXIF
def test_random_damage_gives_pixels_or_a_refusal_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    for make in ENCODINGS.values():
        original = make((17, 13))
        for _ in range(30):
            data = bytearray(original)
            for position in rng.integers(0, len(data), 3):
                data[position] = rng.integers(0, 256)
            try:
                geometry, pixels = read_geometry(bytes(data), "picture"), decode_picture(bytes(data))
            except PictureError:
                continue
            assert pixels.shape == (geometry.height, geometry.width, 3)


@pytest.mark.parametrize("make", [ENCODINGS["jpeg L"], ENCODINGS["jpeg 4:2:0"], ENCODINGS["jpeg turned"]])
def test_ordinary_jpegs_take_the_fast_path_and_equal_pillow(make: Callable[[tuple[int, int]], bytes]) -> None:
    pytest.importorskip("simplejpeg")
    for size in SIZES:
        data = make(size)
        assert decoder._try_fast_jpeg(data, open_picture(data, "picture")) is not None
        assert_as_the_reference(data)


def test_large_jpegs_have_their_pixels_further_apart_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ENCODINGS["jpeg 4:2:0"](SIZE)
    small = decode_picture(data)
    monkeypatch.setattr(decoder, "MAX_PACKED_PIXELS", 100)
    assert np.array_equal(decode_picture(data), small)


@pytest.mark.parametrize("encoding", ["jpeg RGB", "jpeg CMYK"])
def test_jpegs_of_other_colours_are_left_to_pillow(encoding: str) -> None:
    data = ENCODINGS[encoding](SIZE)
    assert decoder._try_fast_jpeg(data, open_picture(data, "picture")) is None


def test_without_simplejpeg_the_pixels_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = ENCODINGS["jpeg turned"](SIZE)
    fast = decode_picture(data)
    monkeypatch.setattr(decoder, "simplejpeg", None)
    assert np.array_equal(decode_picture(data), fast)


PLAIN_PNGS = ("png L", "png RGB", "png RGBA", "png turned")


@pytest.mark.parametrize("encoding", PLAIN_PNGS)
def test_plain_pngs_take_the_fast_path_and_equal_pillow(encoding: str) -> None:
    pytest.importorskip("imagecodecs")
    for size in SIZES:
        data = ENCODINGS[encoding](size)
        assert decoder._try_fast_png(data, open_picture(data, "picture")) is not None
        assert_as_the_reference(data)


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name not in PLAIN_PNGS])
def test_everything_else_is_not_taken_for_a_plain_png(encoding: str) -> None:
    data = ENCODINGS[encoding](SIZE)
    assert decoder._try_fast_png(data, open_picture(data, "picture")) is None


@pytest.mark.parametrize("encoding", PLAIN_PNGS)
def test_without_imagecodecs_the_pixels_are_the_same(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ENCODINGS[encoding](SIZE)
    fast = decode_picture(data)
    monkeypatch.setattr(decoder, "png_decode", None)
    assert np.array_equal(decode_picture(data), fast)


def png_of_parts(
    depth_and_colour: bytes = b"\x08\x02", before: bytes = b"", late: bytes = b"", **of_zlib: Any
) -> bytes:
    """Return a 7 x 5 PNG; `rows` changes its raw rows, `stream` their compressed bytes."""
    rows = b"".join(bytes([row % 5]) + bytes(range(row, row + 21)) for row in range(5))
    stream = zlib.compress(of_zlib.get("rows", bytes)(rows))
    header = struct.pack(">II", 7, 5) + depth_and_colour + b"\0\0\0"
    idat = of_zlib.get("stream", bytes)(stream)
    return png(chunk(b"IHDR", header), before, chunk(b"IDAT", idat[:9]), chunk(b"IDAT", idat[9:]), late)


ODD_PNGS = {
    "every filter": png_of_parts(),
    "harmless chunks": png_of_parts(
        before=chunk(b"gAMA", b"\0\0\xb1\x8f") + chunk(b"sBIT", b"\5\6\5") + chunk(b"bKGD", b"\0\1\0\2\0\3")
    ),
    "a broken profile": png_of_parts(before=chunk(b"iCCP", b"x\0\0" + zlib.compress(b"no profile"))),
    "a suggested palette": png_of_parts(before=chunk(b"PLTE", bytes(9))),
    "a transparent colour": png_of_parts(before=chunk(b"tRNS", b"\0\0\0\1\0\2")),
    "late transparency": png_of_parts(late=chunk(b"tRNS", b"\0\0\0\1\0\2")),
    "one frame of an animation": png_of_parts(before=chunk(b"acTL", struct.pack(">II", 1, 0))),
    "a second header": png_of_parts(before=chunk(b"IHDR", struct.pack(">II", 5, 7) + b"\x08\2\0\0\0")),
    "late text": png_of_parts(late=chunk(b"tEXt", b"date:create\0today") + chunk(b"tIME", bytes(7))),
    "an unknown filter": png_of_parts(rows=lambda rows: b"\6" + rows[1:]),
    "a row too few": png_of_parts(rows=lambda rows: rows[:-22]),
    "a row too many": png_of_parts(rows=lambda rows: rows + rows[:22]),
    "a wrong checksum": png_of_parts(stream=lambda stream: stream[:-1] + b"\0"),
    "no checksum": png_of_parts(stream=lambda stream: stream[:-4]),
    "more behind the checksum": png_of_parts(stream=lambda stream: stream + b"more" * 500),
    "less than half of its content": png_of_parts(stream=lambda stream: stream[:20]),
    "no end": png_of_parts()[:-12],
    "a wrong sum over its content": png_of_parts()[:-13] + b"\0" + png_of_parts()[-12:],
}


def outcome_of(data: bytes) -> object:
    try:
        return decode_picture(data).tolist()
    except PictureError as refusal:
        return type(refusal), str(refusal)


def assert_the_same_without_imagecodecs(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome_of(data)
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "png_decode", None)
        assert outcome_of(data) == found


@pytest.mark.parametrize("oddity", ODD_PNGS)
def test_an_odd_png_ends_as_pillow_alone_would_end_it(oddity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_the_same_without_imagecodecs(ODD_PNGS[oddity], monkeypatch)


@pytest.mark.parametrize("encoding", ["png L", "png RGB", "png RGBA"])
def test_a_cut_or_damaged_png_ends_as_pillow_alone_would_end_it(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = ENCODINGS[encoding]((7, 11))
    for length in range(len(data)):
        assert_the_same_without_imagecodecs(data[:length], monkeypatch)
    chance = random.Random(0)
    for position in range(8, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << chance.randrange(8)
        assert_the_same_without_imagecodecs(bytes(damaged), monkeypatch)
