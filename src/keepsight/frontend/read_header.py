"""What a picture is, from its first bytes: geometry, format, mode.  Never decodes.

Whatever cannot be served is refused here, as far as a header tells: more than one frame (but for MPO, photographs with
a preview or a depth map behind them, of which the first is taken), pixels deeper than 8 bits, too many of them.
"""

from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin

from keepsight.errors import PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.open_picture import PictureSource, open_picture, orientation_of, refusing_damage
from keepsight.frontend.picture_array import view_as_rgb
from keepsight.media import DEFAULT_MAX_PIXELS, Geometry

MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """What is known of a picture before it is decoded; its geometry is that of the decoded pixels."""

    geometry: Geometry
    format: str | None  # None for what was made, not read: some PIL images, all arrays
    mode: str  # of the file, before the conversion to RGB


def read_header(source: PictureSource, field: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> PictureHeader:
    """Refuses what cannot be served, as far as the header tells; `field` is what the caller calls the picture."""
    if isinstance(source, Image.Image):
        header = PictureHeader(Geometry(*source.size), source.format, source.mode)
    elif isinstance(source, np.ndarray):
        height, width, _ = view_as_rgb(source).shape
        header = PictureHeader(Geometry(width, height), None, "RGB")
    else:
        with refusing_damage(field, len(source)):
            header = _parse_header(source, field, max_pixels)
    _check_header(header, field, max_pixels)
    return header


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
    image = open_picture(data, field)
    # Before anything else is asked of the picture: looking for a second frame may prepare room for the first.
    _check_size(Geometry(*image.size), field, max_pixels)
    # An MPO is a photograph that carries another; every viewer shows the first.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise UnsupportedPictureError(
            field, f"a {image.format} of more than 1 frame ({len(data)} bytes); send the frame that is meant"
        )
    return PictureHeader(_upright_geometry(image, data), image.format, image.mode)


def _upright_geometry(image: ImageFile.ImageFile, data: bytes) -> Geometry:
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2:
        return Geometry(width, height)  # Pillow turns these by itself, and reports the size that they will have
    return Geometry(height, width) if orientation_of(image, data) >= 5 else Geometry(width, height)
