"""Reads from the first bytes how large a picture will be once it is decoded. Never decodes.

Pictures that cannot be served are refused here, as far as a header tells: more than one frame (except MPO, photographs
followed by a preview or a depth map, of which the first is taken), pixels deeper than 8 bits, too many pixels.
"""

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, WebPImagePlugin

from keepsight.errors import PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_picture import (
    PictureSource,
    open_picture,
    orientation_of,
    translating_parser_errors,
)
from keepsight.frontend.intake.picture_array import view_as_rgb
from keepsight.media import DEFAULT_MAX_PIXELS, Geometry

MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})


def read_geometry(source: PictureSource, field: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> Geometry:
    """Return the geometry; refuse a picture that cannot be served, as far as the header tells.

    `field` is the caller's name for the picture.
    """
    mode = "RGB"
    if isinstance(source, Image.Image):
        geometry, mode = Geometry(*source.size), source.mode
    elif isinstance(source, np.ndarray):
        height, width, _ = view_as_rgb(source).shape
        geometry = Geometry(width, height)
    else:
        with translating_parser_errors(field, len(source)):
            geometry, mode = _parse_header(source, field, max_pixels)
    check_size(geometry, field, max_pixels)
    if mode == "La":
        raise UnsupportedPictureError(field, "Pillow cannot convert pixels of mode La to RGB; convert them to LA")
    if mode not in MODES:
        raise UnsupportedPictureError(
            field, f"pixels of mode {mode} are deeper than the 8 bits that a channel can have"
        )
    return geometry


def check_size(geometry: Geometry, field: str, max_pixels: int) -> None:
    width, height = geometry.width, geometry.height
    if width < 1 or height < 1:
        raise UnreadablePictureError(field, f"a picture of {width} x {height} pixels is empty")
    if width * height > max_pixels:
        raise PictureTooLargeError(
            field, f"{width} x {height} pixels are {width * height}, at most {max_pixels} are allowed"
        )


def shows_several_frames(data: bytes, field: str, max_pixels: int) -> bool:
    """Return whether a picture has more than one frame. Refuses one whose header cannot be read."""
    with translating_parser_errors(field, len(data)):
        return _has_several_frames(_open_checked(data, field, max_pixels))


def _parse_header(data: bytes, field: str, max_pixels: int) -> tuple[Geometry, str]:
    """Return the geometry, and the mode of the file before conversion to RGB."""
    image = _open_checked(data, field, max_pixels)
    if _has_several_frames(image):
        raise UnsupportedPictureError(
            field, f"a {image.format} of more than 1 frame ({len(data)} bytes); send the frame that is meant"
        )
    return _upright_geometry(image, data, field), image.mode


def _open_checked(data: bytes, field: str, max_pixels: int) -> ImageFile.ImageFile:
    if data[8:12] == b"WEBP" and (announced := WebPImagePlugin._get_size(data[:30])) is not None:
        # Opening a WebP allocates memory for all of its pixels.
        check_size(Geometry(*announced), field, max_pixels)
    try:
        image = open_picture(data, field)
    except Image.DecompressionBombError as error:  # Pillow's limit is not below ours
        raise PictureTooLargeError(field, f"more than the {max_pixels} pixels that are allowed") from error
    # Before anything else: looking for a second frame may allocate memory for the first.
    check_size(Geometry(*image.size), field, max_pixels)
    return image


def _has_several_frames(image: ImageFile.ImageFile) -> bool:
    """Return whether there are several frames, except in an MPO: every viewer shows the first of its photographs."""
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def _upright_geometry(image: ImageFile.ImageFile, data: bytes, field: str) -> Geometry:
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2:
        return Geometry(width, height)  # Pillow rotates these itself, and reports their final size
    return Geometry(height, width) if orientation_of(image, data, field) >= 5 else Geometry(width, height)
