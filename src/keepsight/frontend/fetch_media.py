"""From where a caller says a picture is, to its bytes: `data:` URLs, raw bytes, and objects of this process."""

import base64
from urllib.parse import unquote_to_bytes

from PIL import Image

from keepsight.errors import InvalidArgumentError, UnreadablePictureError, UnsupportedFieldError
from keepsight.frontend.open_picture import PictureSource, refusing_damage
from keepsight.frontend.picture_array import try_freeze_array


def fetch_media(source: object, field: str) -> PictureSource:
    if isinstance(source, str):
        return _read_url(source, field)
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
        return source.copy()


def _read_url(url: str, field: str) -> bytes:
    scheme, colon, _ = url.partition(":")
    scheme = scheme.lower()
    if not colon:
        raise InvalidArgumentError(field, f"{url[:20]!r} is no URL; send the picture as a data: URL")
    if scheme != "data":
        raise UnsupportedFieldError(field, f"{scheme[:20]}: URLs are not supported, send the picture as a data: URL")
    head, comma, body = url.partition(",")
    if not comma:
        raise UnreadablePictureError(field, "the data: URL has no comma, so no content")
    is_base64 = head.lower().endswith(";base64")
    try:
        return base64.b64decode(body, validate=True) if is_base64 else unquote_to_bytes(body)
    except ValueError as error:  # binascii.Error, or characters that no URL has
        kind = "base64" if is_base64 else "percent-encoded"
        raise UnreadablePictureError(field, f"the data: URL is not {kind}: {error}") from error
