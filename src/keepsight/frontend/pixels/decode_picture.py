"""From a picture (its bytes, a PIL image or an array) to its pixels, upright and in RGB, as the reference makes them.

What `read_geometry` refuses is refused here too.  The reference for bytes is transformers' `load_image` (upright, then
`convert("RGB")`) followed by its image processor; for a PIL image, that image passed to the processor as it is.  What
becomes of

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

Of a PIL image with several frames the current one is taken.  An array is taken as it is, grey in three channels.
"""

import logging

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from keepsight.errors import UnreadablePictureError
from keepsight.frontend.intake.open_picture import PictureSource, open_to_decode, orientation_of, refusing_damage
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
    from imagecodecs import png_decode  # of its many codecs, this loads the one
except ImportError:
    png_decode = None

logging.getLogger("imagecodecs").setLevel(logging.ERROR)  # it would note every odd colour profile

# Pixels 3 bytes apart make torch's resize faster, 4 bytes apart Pillow's: the more pixels the more so.
MAX_PACKED_PIXELS = 2_000_000


def decode_picture(source: PictureSource, field: str = "image", max_pixels: int = DEFAULT_MAX_PIXELS) -> Pixels:
    """uint8 [height, width, 3]; its pixels lie 3 or 4 bytes apart, whichever takes least work to get."""
    told = read_geometry(source, field, max_pixels)
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(view_as_rgb(source))
    if isinstance(source, Image.Image):
        with refusing_damage(field, None):
            return _padded_pixels(_to_rgb(source))
    with refusing_damage(field, len(source)):
        pixels = _decode(source)
    height, width, _ = pixels.shape
    if Geometry(width, height) != told:
        # The prompt was laid out by the header: pixels of another shape must not follow.
        raise UnreadablePictureError(
            field, f"its header says {told.width} x {told.height} pixels, its content has {width} x {height}"
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
    """The same library as Pillow's, without its copies; None for whatever it does not do exactly as Pillow does."""
    if simplejpeg is None or image.format not in ("JPEG", "MPO") or image.mode not in ("RGB", "L"):
        return None
    try:
        # Adobe's RGB, CMYK and YCCK stay with Pillow.
        if simplejpeg.decode_jpeg_header(data)[2] not in ("YCbCr", "Gray"):
            return None
        # Turning moves whole words.
        is_packed = image.width * image.height <= MAX_PACKED_PIXELS and orientation_of(image, data) == 1
        pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB" if is_packed else "RGBX")
    except ValueError:
        # Truncated or slightly damaged: Pillow decides which, as the reference does.
        return None
    return pixels[..., :3]


def _try_fast_png(data: bytes, image: ImageFile.ImageFile) -> Pixels | None:
    """Half of the time of Pillow's own decoder; None for whatever it does not do exactly as Pillow does."""
    if png_decode is None or image.format != "PNG" or not is_plain_png(data):
        return None
    try:
        decoded: Pixels = png_decode(data)
    except (RuntimeError, ValueError):
        # Damaged: Pillow decides whether too much so, as the reference does.
        return None
    # Grey becomes three channels and a fourth byte of nothing. An alpha is dropped.
    return decoded[..., :3] if decoded.ndim == 3 else _padded(decoded * np.uint32(0x10101))


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


def _copy_in_tiles(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Contiguous; three times as fast as copying row by row when the rows were columns."""
    copy = np.empty_like(words, order="C")
    height, width = words.shape
    tile = 64
    for top in range(0, height, tile):
        for left in range(0, width, 4 * tile):
            area = np.s_[top : top + tile, left : left + 4 * tile]
            copy[area] = words[area]
    return copy
