"""Resolves a picture's source to its content: `data:` URLs, raw bytes, and objects of this process."""

from PIL import Image

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.intake.open_picture import PictureSource, translating_parser_errors
from keepsight.frontend.intake.picture_array import try_freeze_array
from keepsight.frontend.intake.read_data_url import read_data_url

# Length of the beginning in which a URL's colon is looked for.
_LONGEST_SCHEME = 20


def scheme_of(url: str) -> str | None:
    """Return the scheme in lower case, or None if this is no URL.  The rest may be megabytes and is not examined."""
    scheme, colon, _ = url[:_LONGEST_SCHEME].partition(":")
    return scheme.lower() if colon and scheme == scheme.strip() else None


def fetch_url(url: str, field: str, max_bytes: int | None = None) -> bytes:
    """Return the content of a `data:` URL; one larger than `max_bytes` is refused before it is decoded."""
    scheme = scheme_of(url)
    if scheme is None:
        raise InvalidArgumentError(
            field, f"{_begin(url)} is not a URL; send a file as a data: URL, or to LLM as its bytes"
        )
    if scheme != "data":
        raise UnsupportedFieldError(field, f"{scheme}: URLs are not supported, send it as a data: URL")
    return read_data_url(url, field, max_bytes)


def _begin(url: str) -> str:
    return repr(url) if len(url) <= 80 else f"{url[:20]!r}..."


def take_source(source: object, field: str) -> PictureSource:
    """Return the picture source that an object of this process, or downloaded content, stands for."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Image.Image):
        return source
    array = try_freeze_array(source, field)
    if array is None:
        kinds = "a URL, a file's bytes, a PIL image, an array or a tensor"
        raise InvalidArgumentError(field, f"must be {kinds}, not {type(source).__name__}")
    return array


def freeze(source: PictureSource, field: str) -> PictureSource:
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
