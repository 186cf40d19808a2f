"""How large a picture is once it is decoded, from its first bytes.  Never decodes.

Whatever cannot be served is refused here, as far as a header tells: more than one frame (but for MPO, photographs with
a preview or a depth map behind them, of which the first is taken), pixels deeper than 8 bits, too many of them.
"""

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, WebPImagePlugin

from keepsight.errors import PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake.open_picture import PictureSource, open_picture, orientation_of, refusing_damage
from keepsight.frontend.intake.picture_array import view_as_rgb
from keepsight.media import DEFAULT_MAX_PIXELS, Geometry

MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"})


def read_geometry(source: PictureSource, field: str, max_pixels: int = DEFAULT_MAX_PIXELS) -> Geometry:
    """Refuses what cannot be served, as far as the header tells; `field` is what the caller calls the picture."""
    mode = "RGB"
    if isinstance(source, Image.Image):
        geometry, mode = Geometry(*source.size), source.mode
    elif isinstance(source, np.ndarray):
        height, width, _ = view_as_rgb(source).shape
        geometry = Geometry(width, height)
    else:
        with refusing_damage(field, len(source)):
            geometry, mode = _parse_header(source, field, max_pixels)
    check_size(geometry, field, max_pixels)
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
    """Refuses what no header can be read of."""
    with refusing_damage(field, len(data)):
        return _has_several_frames(_open_checked(data, field, max_pixels))


def _parse_header(data: bytes, field: str, max_pixels: int) -> tuple[Geometry, str]:
    """And the mode of the file, before the conversion to RGB."""
    image = _open_checked(data, field, max_pixels)
    if _has_several_frames(image):
        raise UnsupportedPictureError(
            field, f"a {image.format} of more than 1 frame ({len(data)} bytes); send the frame that is meant"
        )
    return _upright_geometry(image, data, field), image.mode


def _open_checked(data: bytes, field: str, max_pixels: int) -> ImageFile.ImageFile:
    if data[8:12] == b"WEBP" and (announced := WebPImagePlugin._get_size(data[:30])) is not None:
        # Opening one makes room for all of it.
        check_size(Geometry(*announced), field, max_pixels)
    try:
        image = open_picture(data, field)
    except Image.DecompressionBombError as error:  # its limit is not below ours
        raise PictureTooLargeError(field, f"more than the {max_pixels} pixels that are allowed") from error
    # Before anything else is asked of the picture: looking for a second frame may prepare room for the first.
    check_size(Geometry(*image.size), field, max_pixels)
    return image


def _has_several_frames(image: ImageFile.ImageFile) -> bool:
    """An MPO is a photograph that carries another; every viewer shows the first."""
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


def _upright_geometry(image: ImageFile.ImageFile, data: bytes, field: str) -> Geometry:
    width, height = image.size
    if isinstance(image, TiffImagePlugin.TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2:
        return Geometry(width, height)  # Pillow turns these by itself, and reports the size that they will have
    return Geometry(height, width) if orientation_of(image, data, field) >= 5 else Geometry(width, height)
