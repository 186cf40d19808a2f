"""From the bytes of a picture (or a PIL image) to its geometry and, only when asked, to its pixels.

`read_header` never decodes, `decode_picture` gives what the reference makes of the same source, both refuse the same
pictures.  The reference for bytes is transformers' `load_image` (upright, then `convert("RGB")`) followed by its image
processor; for a PIL image, that image passed to the processor as it is.  What becomes of

=================  =====================================  ===========================================
mode               as bytes                               as a PIL image
=================  =====================================  ===========================================
EXIF orientation   applied (also from XMP and AVIF)       ignored
RGBA, LA, PA       alpha dropped                          composed over white
P                  palette looked up                      palette looked up
P + tRNS           one transparent colour becomes white,  composed over white
                   an alpha for each colour is dropped
L, RGB + tRNS      the transparent colour becomes white   the transparent colour becomes white
1, L               grey in three channels                 grey in three channels
CMYK, YCbCr, LAB   Pillow's conversion to RGB, colour     the same
                   profiles ignored
16-bit RGB(A), LA  Pillow keeps the upper 8 bits          (no such mode)
I, I;16, F         refused: the reference clips to white  refused
=================  =====================================  ===========================================

More than one frame is refused, but for MPO (photographs with a preview or a depth map behind them), of which the first
is taken, and for PIL images, whose current frame is taken.
"""

import io
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Imported for what they register with Pillow. No others are: some start programs (EPS), others are seldom tested.
from PIL import (
    AvifImagePlugin,  # noqa: F401
    BmpImagePlugin,  # noqa: F401
    ExifTags,
    GifImagePlugin,  # noqa: F401
    Image,
    ImageFile,
    Jpeg2KImagePlugin,  # noqa: F401
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    PpmImagePlugin,  # noqa: F401
    TiffImagePlugin,
    WebPImagePlugin,  # noqa: F401
)

from keepsight.errors import KeepsightError, PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.media import Geometry
from keepsight.requests import Pixels

try:
    import simplejpeg
except ImportError:
    simplejpeg = None
try:
    from imagecodecs import png_decode  # of its many codecs, this loads the one
except ImportError:
    png_decode = None

logging.getLogger("imagecodecs").setLevel(logging.ERROR)  # it would note every odd colour profile

PictureSource = bytes | Image.Image

DEFAULT_MAX_PIXELS = 64_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "JPEG2000", "PPM")
MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})
# Pixels 3 bytes apart make torch's resize faster, 4 bytes apart Pillow's: the more pixels the more so.
MAX_PACKED_PIXELS = 2_000_000
# What a PNG may hold besides its pixels without changing any of them: neither transparency nor a second frame.
PLAIN_PNG_CHUNKS = frozenset(b"IHDR IDAT IEND bKGD cHRM eXIf gAMA iCCP iTXt pHYs sBIT sRGB tEXt tIME zTXt".split())


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """What is known of a picture before it is decoded; its geometry is that of the decoded pixels."""

    geometry: Geometry
    format: str | None  # None for a PIL image that was made, not read
    mode: str  # of the file, before the conversion to RGB


def read_header(source: PictureSource, field: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> PictureHeader:
    """Refuses what cannot be served, as far as the header tells; `field` is what the caller calls the picture."""
    if isinstance(source, Image.Image):
        header = PictureHeader(Geometry(*source.size), source.format, source.mode)
    else:
        with _refusing_damage(field, len(source)):
            header = _parse_header(source, field, max_pixels)
    _check_header(header, field, max_pixels)
    return header


def decode_picture(source: PictureSource, field: str = "image", max_pixels: int = DEFAULT_MAX_PIXELS) -> Pixels:
    """uint8 [height, width, 3]; its pixels lie 3 or 4 bytes apart, whichever takes least work to get."""
    header = read_header(source, field, max_pixels)
    if isinstance(source, Image.Image):
        with _refusing_damage(field, None):
            return _padded_pixels(_to_rgb(source))
    with _refusing_damage(field, len(source)):
        pixels = _decode(source)
    height, width, _ = pixels.shape
    if Geometry(width, height) != header.geometry:
        # The prompt was laid out by the header: pixels of another shape must not follow.
        told = header.geometry
        raise UnreadablePictureError(
            field, f"its header says {told.width} x {told.height} pixels, its content has {width} x {height}"
        )
    return pixels


@contextmanager
def _refusing_damage(field: str, num_bytes: int | None) -> Iterator[None]:
    """Pillow's parsers raise whatever they stumbled over."""
    try:
        yield
    except (KeepsightError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise PictureTooLargeError(field, str(error)) from error
    except Exception as error:
        size = "" if num_bytes is None else f" ({num_bytes} bytes)"
        raise UnreadablePictureError(field, f"the picture{size} is damaged or truncated: {error}") from error


def _check_header(header: PictureHeader, field: str, max_pixels: int) -> None:
    _check_size(header.geometry, field, max_pixels)
    if header.mode not in MODES:
        raise UnsupportedPictureError(
            field, f"pixels of mode {header.mode} are deeper than the 8 bits that a channel can have"
        )


def _check_size(geometry: Geometry, field: str, max_pixels: int) -> None:
    width, height = geometry.width, geometry.height
    if width < 1 or height < 1:
        raise UnreadablePictureError(field, f"a picture of {width} x {height} pixels is empty")
    if width * height > max_pixels:
        raise PictureTooLargeError(
            field, f"{width} x {height} pixels are {width * height}, at most {max_pixels} are allowed"
        )


def _parse_header(data: bytes, field: str, max_pixels: int) -> PictureHeader:
    image = _open(data, field)
    # Before anything else is asked of the picture: looking for a second frame may prepare room for the first.
    _check_size(Geometry(*image.size), field, max_pixels)
    # An MPO is a photograph that carries another; every viewer shows the first.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise UnsupportedPictureError(
            field, f"a {image.format} of more than 1 frame ({len(data)} bytes); send the frame that is meant"
        )
    return PictureHeader(_upright_geometry(image, data), image.format, image.mode)


def _open(data: bytes, field: str) -> ImageFile.ImageFile:
    """`Image.open` without its guard against large pictures, which warns the wrong party; `max_pixels` is ours."""
    if not data:
        raise UnreadablePictureError(field, "the picture has 0 bytes")
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is not None and accept(data[:16]) is True:
            image = factory(io.BytesIO(data), "")
            assert isinstance(image, ImageFile.ImageFile), name
            return image
    raise UnreadablePictureError(field, f"{len(data)} bytes that are none of {', '.join(FORMATS)}")


def _upright_geometry(image: ImageFile.ImageFile, data: bytes) -> Geometry:
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2:
        return Geometry(width, height)  # Pillow turns these by itself, and reports the size that they will have
    return Geometry(height, width) if _orientation(_holder_of_metadata(image, data)) >= 5 else Geometry(width, height)


def _orientation(image: Image.Image) -> int:
    """1 (upright) to 8; the odd values, from 5 on, exchange width and height."""
    # Not image.getexif(): that of a PNG decodes the picture, in case metadata follows the pixels.
    value = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _holder_of_metadata(image: ImageFile.ImageFile, data: bytes) -> Image.Image:
    """The picture itself, or for a PNG whose metadata follows its pixels a stand-in that has it all in its header."""
    reordered = _reorder_png(data) if image.format == "PNG" else None
    return image if reordered is None else Image.OPEN["PNG"][0](io.BytesIO(reordered), "")


def _reorder_png(data: bytes) -> bytes | None:
    """The PNG with no pixels and its late metadata moved before them; None if none is late."""
    kept, has_pixels, has_late_metadata = [data[:8]], False, False
    for kind, chunk in _png_chunks(data):
        if kind == b"IDAT":
            has_pixels = True
        elif kind in (b"IHDR", b"PLTE") or (kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt") and chunk.stop <= len(data)):
            has_late_metadata |= has_pixels
            kept.append(data[chunk])
    empty_pixels = struct.pack(">I4sI", 0, b"IDAT", 0x35AF061E)
    return b"".join((*kept, empty_pixels)) if has_late_metadata else None


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, slice]]:
    """The kind and the place of each; the last may end behind the data."""
    position = 8
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        yield kind, slice(position, position + 12 + length)
        position += 12 + length


def _decode(data: bytes) -> Pixels:
    image = _open(data, "image")
    pixels = _try_fast_jpeg(data, image)
    if pixels is None:
        pixels = _try_fast_png(data, image)
    if pixels is None:
        image.load()
        return _orient(_padded_pixels(_to_rgb(_as_load_image(image))), _orientation(image))
    return _orient(pixels, _orientation(_holder_of_metadata(image, data)))


def _try_fast_jpeg(data: bytes, image: ImageFile.ImageFile) -> Pixels | None:
    """The same library as Pillow's, without its copies; None for whatever it does not do exactly as Pillow does."""
    if simplejpeg is None or image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    try:
        # Adobe's RGB, CMYK and YCCK stay with Pillow.
        if simplejpeg.decode_jpeg_header(data)[2] not in ("YCbCr", "Gray"):
            return None
        # Turning moves whole words.
        is_packed = image.width * image.height <= MAX_PACKED_PIXELS and _orientation(image) == 1
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB" if is_packed else "RGBX")
    except ValueError:
        # Truncated or slightly damaged: Pillow decides which, as the reference does.
        return None
    return pixels[..., :3]


def _try_fast_png(data: bytes, image: ImageFile.ImageFile) -> Pixels | None:
    """Half of the time of Pillow's own decoder; None for whatever it does not do exactly as Pillow does."""
    if png_decode is None or image.format != "PNG" or not _is_plain_png(data):
        return None
    try:
        decoded: Pixels = png_decode(data)
    except (RuntimeError, ValueError):
        # Damaged: Pillow decides whether too much so, as the reference does.
        return None
    # Grey becomes three channels and a fourth byte of nothing. An alpha is dropped.
    return decoded[..., :3] if decoded.ndim == 3 else _padded(decoded * np.uint32(0x10101))


def _is_plain_png(data: bytes) -> bool:
    """Complete, 8 bits a channel, grey, RGB or RGBA, not interlaced, nothing in it that changes pixels."""
    depth, colour, _, _, interlacing = data[24:29]
    if depth != 8 or colour not in (0, 2, 6) or interlacing != 0:
        return False
    for kind, chunk in _png_chunks(data):
        if kind not in PLAIN_PNG_CHUNKS or chunk.stop > len(data):
            return False
        if kind == b"IEND":
            return True
    return False


def _as_load_image(image: Image.Image) -> Image.Image:
    """transformers' `load_image` after the turning, which is left for later: it moves pixels and changes none."""
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        # `convert` would drop it too, with a warning to whoever runs the server.
        del image.info["transparency"]
    return image if image.mode == "RGB" else image.convert("RGB")  # it would copy


def _to_rgb(image: Image.Image) -> Image.Image:
    """transformers' `convert_to_rgb`: what is transparent shows white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _padded_pixels(image: Image.Image) -> Pixels:
    padded = np.frombuffer(image.tobytes("raw", "RGBX"), dtype=np.uint8)
    return padded.reshape(image.height, image.width, 4)[..., :3]


def _orient(pixels: Pixels, orientation: int) -> Pixels:
    """Turns pixels by the meaning of EXIF's eight orientations."""
    if orientation == 1:
        return pixels
    columns = -1 if orientation in (2, 3, 7, 8) else 1
    rows = -1 if orientation in (3, 4, 6, 7) else 1
    turned = _words(pixels)[::rows, ::columns]
    return _padded(_copy_in_tiles(turned.T if orientation >= 5 else turned))


def _words(pixels: Pixels) -> npt.NDArray[np.uint32]:
    """[height, width], a pixel each."""
    height, width, _ = pixels.shape
    if pixels.strides[1] == 3:
        pixels = _padded_pixels(Image.fromarray(pixels))
    assert pixels.base is not None
    return pixels.base.reshape(-1).view(np.uint32).reshape(height, width)


def _padded(words: npt.NDArray[np.uint32]) -> Pixels:
    return words.view(np.uint8).reshape(*words.shape, 4)[..., :3]


def _copy_in_tiles(words: npt.NDArray[np.uint32], tile: int = 64) -> npt.NDArray[np.uint32]:
    """Contiguous; three times as fast as copying row by row when the rows were columns."""
    copy = np.empty_like(words, order="C")
    height, width = words.shape
    for top in range(0, height, tile):
        for left in range(0, width, 4 * tile):
            area = np.s_[top : top + tile, left : left + 4 * tile]
            copy[area] = words[area]
    return copy
