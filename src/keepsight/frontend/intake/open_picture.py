"""Opens the bytes of a picture with Pillow, without decoding them, and reads its orientation from its metadata.

Only formats that are named here are opened, and whatever Pillow raises is turned into an error of ours.
"""

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager

# Imported to register with Pillow. No others are: some start programs (EPS), others are rarely tested.
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
    TiffImagePlugin,  # noqa: F401
    WebPImagePlugin,  # noqa: F401
)

from keepsight.errors import KeepsightError, PictureTooLargeError, UnreadablePictureError
from keepsight.frontend.intake.check_header import CountedFile, check_exif, check_header
from keepsight.frontend.intake.picture_array import PictureArray
from keepsight.frontend.intake.png_chunks import with_metadata_first

PictureSource = bytes | Image.Image | PictureArray

_HEIC_HINT = ", but a HEIC, as phones take: send it as JPEG"
# After `ftyp`, of one picture and of several.
HEIC_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"})
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP", "TIFF", "JPEG2000", "PPM")


def open_picture(data: bytes, field: str) -> ImageFile.ImageFile:
    """Open a picture like `Image.open`, but without its guard against large pictures, which does not warn the client.

    Our guard is `max_pixels`. The header may cost no more than `check_header` allows, so the picture cannot
    be decoded: that takes more reads.
    """
    format_ = _format_of(data, field)
    check_header(data, format_, field)
    image = _parse(CountedFile(data, format_, field), format_)
    check_exif(image, field)
    return image


def open_to_decode(data: bytes) -> ImageFile.ImageFile:
    """Reopen, for decoding, a picture that `open_picture` has opened before."""
    return _parse(io.BytesIO(data), _format_of(data, "image"))


def _format_of(data: bytes, field: str) -> str:
    if not data:
        raise UnreadablePictureError(field, "the picture has 0 bytes")
    if (name := find_format(data)) is not None:
        return name
    hint = _HEIC_HINT if brand_of(data) in HEIC_BRANDS else hint_for_text(data)
    raise UnreadablePictureError(field, f"{len(data)} bytes that are none of {', '.join(FORMATS)}{hint}")


def brand_of(data: bytes) -> bytes:
    """Return what a file of MP4 boxes says it is: a picture, a film or a sound. Empty for other files."""
    return data[8:12] if data[4:8] == b"ftyp" else b""


def find_format(data: bytes) -> str | None:
    """Return the format of a picture by its first bytes, or None if it is of none that is read here."""
    for name in FORMATS:
        _, accept = Image.OPEN[name]
        if accept is not None and accept(data[:16]) is True:
            return name
    return None


def hint_for_text(data: bytes) -> str:
    """Return how to go on with text that is in a file's place. (Not the text: a URL must not make it readable.)"""
    if not looks_like_text(data):
        return ""
    beginning = data[:1024].removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if beginning.startswith((b"<!doctype html", b"<html")):
        return ", but a web page: send the file on it, or that file's own URL"
    if beginning.startswith(b"<") and b"<svg" in beginning:
        return ", but an SVG: send it as PNG"
    return ", but look like text: send them as text; if they come from a URL, it is not that of the file itself"


def looks_like_text(data: bytes) -> bool:
    """Return whether the beginning of the data is text. It may end within a multi-byte character."""
    try:
        beginning = codecs.getincrementaldecoder("utf-8-sig")().decode(data[:1024])
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in beginning)


def _parse(file: io.BytesIO, format_: str) -> ImageFile.ImageFile:
    image = Image.OPEN[format_][0](file, "")
    assert isinstance(image, ImageFile.ImageFile), format_
    return image


@contextmanager
def translating_parser_errors(field: str, num_bytes: int | None, kind: str = "picture") -> Iterator[None]:
    """Turn the exceptions of Pillow's and ffmpeg's parsers, which may be of any type, into errors of ours.

    `num_bytes` is None for an image that a caller opened.
    """
    try:
        yield
    except (KeepsightError, MemoryError):
        raise
    except Image.DecompressionBombError as error:
        raise PictureTooLargeError(field, str(error)) from error
    except Exception as error:
        if num_bytes is None:
            fault = "was closed (ask within its `with`, or load() it first), or its file is damaged or truncated"
        else:
            fault = f"the {kind} ({num_bytes} bytes) is damaged or truncated"
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreadablePictureError(field, f"{fault}: {reason}") from error


def orientation_of(image: ImageFile.ImageFile, data: bytes, field: str = "image") -> int:
    """Return the orientation, from 1 (upright) to 8; values from 5 on exchange width and height."""
    value = exif_of(image, data, field).get(ExifTags.Base.Orientation, 1)
    # It may have been written as any type of number.
    return int(value) if value in range(1, 9) else 1


def exif_of(image: ImageFile.ImageFile, data: bytes, field: str) -> Image.Exif:
    # Not image.getexif(), which decodes a PNG, in case metadata follows the pixels.
    return Image.Image.getexif(_holder_of_metadata(image, data, field))


def _holder_of_metadata(image: ImageFile.ImageFile, data: bytes, field: str) -> Image.Image:
    """Return the picture or, for a PNG with metadata after its pixels, a stand-in with all metadata in its header."""
    reordered = with_metadata_first(data) if image.format == "PNG" else None
    return image if reordered is None else open_picture(reordered, field)
