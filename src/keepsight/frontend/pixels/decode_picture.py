"""Decodes a picture (bytes, a PIL image or an array) into pixels, upright and in RGB, as the reference does.

Everything that `read_geometry` refuses is refused here too. The reference for bytes is transformers' `load_image`
(upright, then `convert("RGB")`) followed by its image processor; for a PIL image, that image passed to the processor as
it is. Modes are converted as follows:

=================  =====================================  ===========================================
mode               as bytes                               as a PIL image
=================  =====================================  ===========================================
EXIF orientation   applied (also from XMP and AVIF)       ignored
RGBA, LA, PA       alpha dropped                          composed over white
P                  palette looked up                      palette looked up
P + tRNS           one transparent color becomes white,   composed over white
                   an alpha for each color is dropped
L, RGB + tRNS      the transparent color becomes white    the transparent color becomes white
1, L               gray in three channels                 gray in three channels
CMYK, YCbCr, LAB   Pillow's conversion to RGB, color      the same
                   profiles ignored
16-bit RGB(A), LA  Pillow keeps the upper 8 bits          (no such mode)
I, I;16, F         refused: the reference clips to white  refused
La                 (no such mode)                         refused: the reference fails
=================  =====================================  ===========================================

A PIL image with several frames stands for its current frame. An array is taken as it is, gray in three channels.
"""

import logging

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.open_picture import (
    PictureSource,
    open_to_decode,
    orientation_of,
    translating_parser_errors,
)
from keepsight.frontend.intake.picture_array import view_as_rgb
from keepsight.frontend.intake.png_chunks import is_plain_png
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.media import DEFAULT_MAX_PIXELS, Geometry
from keepsight.requests import Pixels

try:
    import simplejpeg
except ImportError:
    simplejpeg = None
try:
    from imagecodecs import png_decode  # loads only this one of its many codecs
except ImportError:
    png_decode = None

logging.getLogger("imagecodecs").setLevel(logging.ERROR)  # it would log every odd color profile

# A pixel stride of 3 bytes makes torch's resize faster, one of 4 bytes Pillow's: the more pixels, the more so.
MAX_PACKED_PIXELS = 2_000_000


def decode_picture(source: PictureSource, field: str = "image", max_pixels: int = DEFAULT_MAX_PIXELS) -> Pixels:
    """Return uint8 [height, width, 3] with a pixel stride of 3 or 4 bytes, whichever takes the least work."""
    expected = read_geometry(source, field, max_pixels)
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(view_as_rgb(source))
    if isinstance(source, Image.Image):
        with translating_parser_errors(field, None):
            return _padded_pixels(_to_rgb(source))
    with translating_parser_errors(field, len(source)):
        pixels = _decode(source)
    height, width, _ = pixels.shape
    if Geometry(width, height) != expected:
        # The prompt was laid out by the header, so pixels of another shape must be refused.
        raise UnreadablePictureError(
            field, f"its header says {expected.width} x {expected.height} pixels, its content has {width} x {height}"
        )
    return pixels


def _decode(data: bytes) -> Pixels:
    image = open_to_decode(data)
    pixels = _try_fast_jpeg(data, image)
    if pixels is None:
        pixels = _try_fast_png(data, image)
    if pixels is None:
        image.load()
        pixels = _padded_pixels(_to_rgb(_as_load_image(image)))
    return _orient(pixels, orientation_of(image, data))


def _try_fast_jpeg(data: bytes, image: ImageFile.ImageFile) -> Pixels | None:
    """Decode with Pillow's own library, without Pillow's copies; None if the result might differ from Pillow's."""
    if simplejpeg is None or image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    try:
        # Adobe's RGB, CMYK and YCCK are left to Pillow.
        if simplejpeg.decode_jpeg_header(data)[2] not in ("YCbCr", "Gray"):
            return None
        # Rotation moves whole words of 4 bytes.
        is_packed = image.width * image.height <= MAX_PACKED_PIXELS and orientation_of(image, data) == 1
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB" if is_packed else "RGBX")
    except ValueError:
        # Truncated or slightly damaged: Pillow decides which it is, as in the reference.
        return None
    return pixels[..., :3]


def _try_fast_png(data: bytes, image: ImageFile.ImageFile) -> Pixels | None:
    """Decode in half the time of Pillow's own decoder; None if the result might differ from Pillow's."""
    if png_decode is None or image.format != "PNG" or not is_plain_png(data):
        return None
    try:
        decoded: Pixels = png_decode(data)
    except (RuntimeError, ValueError):
        # Damaged: Pillow decides whether too much so, as in the reference.
        return None
    # Gray becomes three channels and a fourth byte of zero. Alpha is dropped.
    return decoded[..., :3] if decoded.ndim == 3 else _padded(decoded * np.uint32(0x10101))


def _as_load_image(image: Image.Image) -> Image.Image:
    """Do what transformers' `load_image` does after rotation, which comes later here: it changes no pixels' values."""
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        # `convert` would drop it too, but with a warning.
        del image.info["transparency"]
    return image if image.mode == "RGB" else image.convert("RGB")  # `convert` would copy


def _to_rgb(image: Image.Image) -> Image.Image:
    """Do what transformers' `convert_to_rgb` does: compose transparent pixels over white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _padded_pixels(image: Image.Image) -> Pixels:
    padded = np.frombuffer(image.tobytes("raw", "RGBX"), dtype=np.uint8)
    return padded.reshape(image.height, image.width, 4)[..., :3]


def _orient(pixels: Pixels, orientation: int) -> Pixels:
    """Rotate and mirror pixels as EXIF's eight orientations say."""
    if orientation == 1:
        return pixels
    columns = -1 if orientation in (2, 3, 7, 8) else 1
    rows = -1 if orientation in (3, 4, 6, 7) else 1
    turned = _words(pixels)[::rows, ::columns]
    return _padded(_copy_in_tiles(turned.T if orientation >= 5 else turned))


def _words(pixels: Pixels) -> npt.NDArray[np.uint32]:
    """Return the pixels as words [height, width], one for each pixel."""
    height, width, _ = pixels.shape
    if pixels.strides[1] == 3:
        pixels = _padded_pixels(Image.fromarray(pixels))
    assert pixels.base is not None
    return pixels.base.reshape(-1).view(np.uint32).reshape(height, width)


def _padded(words: npt.NDArray[np.uint32]) -> Pixels:
    return words.view(np.uint8).reshape(*words.shape, 4)[..., :3]


def _copy_in_tiles(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return a contiguous copy; three times as fast as copying row by row when the words are transposed."""
    copy = np.empty_like(words, order="C")
    height, width = words.shape
    tile = 64
    for top in range(0, height, tile):
        for left in range(0, width, 4 * tile):
            area = np.s_[top : top + tile, left : left + 4 * tile]
            copy[area] = words[area]
    return copy
