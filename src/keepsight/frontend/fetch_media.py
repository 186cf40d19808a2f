"""From where a caller says a picture is, to its bytes: `data:` URLs, raw bytes, and objects of this process."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from PIL import Image

from keepsight.errors import InvalidArgumentError, UnreadablePictureError, UnsupportedFieldError
from keepsight.frontend.read_picture import PictureSource


def fetch_media(source: object, field: str) -> PictureSource:
    if isinstance(source, str):
        return _read_url(source, field)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Image.Image):
        return source
    raise InvalidArgumentError(field, f"must be a URL, bytes or a PIL image, not {type(source).__name__}")


def _read_url(url: str, field: str) -> bytes:
    scheme = url.split(":", 1)[0].lower()
    if scheme != "data":
        raise UnsupportedFieldError(field, f"{scheme[:20]}: URLs are not supported, send the picture as a data: URL")
    head, comma, body = url.partition(",")
    if not comma:
        raise UnreadablePictureError(field, "the data: URL has no comma, so no content")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadablePictureError(field, f"the data: URL is not base64: {error}") from error
