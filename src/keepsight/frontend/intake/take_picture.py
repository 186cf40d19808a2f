"""Accepts pictures that are objects of this process: bytes of a file, a PIL image, an array or a tensor."""

from PIL import Image

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.intake.open_picture import PictureSource, translating_parser_errors
from keepsight.frontend.intake.picture_array import try_freeze_array


def take_picture(source: object, field: str) -> PictureSource:
    """Return the picture; what is returned never changes, but for a PIL image, which `freeze_picture` copies."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Image.Image):
        return source
    array = try_freeze_array(source, field)
    if array is None:
        kinds = "a URL, a file's bytes, a PIL image, an array or a tensor"
        raise InvalidArgumentError(field, f"must be {kinds}, not {type(source).__name__}")
    return array


def freeze_picture(source: PictureSource, field: str) -> PictureSource:
    """Copy a PIL image, so that later changes by the caller are not cached under the original's name."""
    if not isinstance(source, Image.Image):
        return source
    # Its pixels may not have been read from its file yet.
    with translating_parser_errors(field, None):
        copy = source.copy()
    _check_transparency(copy.info.get("transparency"), field)
    return copy


def _check_transparency(value: object, field: str) -> None:
    """Refuse numpy numbers, which cannot be hashed into the picture's name; nor does Pillow take them for a palette."""
    values = value if isinstance(value, tuple) else (value,)
    if value is not None and not isinstance(value, bytes) and not all(isinstance(each, int) for each in values):
        raise InvalidArgumentError(
            field, f"has the transparency {value!r:.80}: it must be an integer, a tuple of integers or bytes"
        )
