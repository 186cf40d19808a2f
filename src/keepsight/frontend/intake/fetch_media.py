"""From where a caller says a picture is, to its bytes: `data:` URLs, raw bytes, and objects of this process."""

from PIL import Image

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.intake.open_picture import PictureSource, refusing_damage
from keepsight.frontend.intake.picture_array import try_freeze_array
from keepsight.frontend.intake.read_data_url import read_data_url

# Of what stands before the colon, the only part of a URL that is looked at here.
_LONGEST_SCHEME = 20


def scheme_of(url: str) -> str | None:
    """In small letters; None of what is no URL.  The rest of it, which may be megabytes, is not looked at."""
    scheme, colon, _ = url[:_LONGEST_SCHEME].partition(":")
    return scheme.lower() if colon and scheme == scheme.strip() else None


def fetch_url(url: str, field: str, max_bytes: int | None = None) -> bytes:
    """Of what the URL itself holds; `max_bytes` spares the decoding of what is too large."""
    scheme = scheme_of(url)
    if scheme is None:
        raise InvalidArgumentError(field, f"{url[:20]!r} is no URL; send it as a data: URL")
    if scheme != "data":
        raise UnsupportedFieldError(field, f"{scheme}: URLs are not supported, send it as a data: URL")
    return read_data_url(url, field, max_bytes)


def take_source(source: object, field: str) -> PictureSource:
    """Of an object of this process, or of what a URL has led to."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Image.Image):
        return source
    array = try_freeze_array(source, field)
    if array is None:
        kinds = "a URL, bytes, a PIL image, an array or a tensor"
        raise InvalidArgumentError(field, f"must be {kinds}, not {type(source).__name__}")
    return array


def freeze(source: PictureSource, field: str) -> PictureSource:
    """What the caller changes afterwards must not end up under the name of what it was."""
    if not isinstance(source, Image.Image):
        return source
    # Its content may still lie in the file that it was opened from.
    with refusing_damage(field, None):
        copy = source.copy()
    _check_transparency(copy.info.get("transparency"), field)
    return copy


def _check_transparency(value: object, field: str) -> None:
    """It is a part of the picture's name, and numpy's numbers have none; nor does Pillow take them for a palette's."""
    values = value if isinstance(value, tuple) else (value,)
    if value is not None and not isinstance(value, bytes) and not all(isinstance(each, int) for each in values):
        raise InvalidArgumentError(
            field, f"has the transparency {value!r:.80}: it must be an integer, a tuple of integers or bytes"
        )
