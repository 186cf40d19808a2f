"""`data:` URLs: the content is decoded from where it lies in the request's body, or copied once out of its text."""

from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from keepsight.errors import MediaTooLargeError, UnreadablePictureError
from keepsight.frontend.lift_data_urls import LiftedUrl

b64decode: Callable[..., bytes]
try:
    from pybase64 import b64decode  # 30 times as fast
except ImportError:
    from base64 import b64decode


def read_data_url(url: str, field: str, max_bytes: int | None = None) -> bytes:
    head, comma, body = _split(url)
    if not comma:
        raise UnreadablePictureError(field, "the data: URL has no comma, so no content")
    is_base64 = head.lower().endswith(";base64")
    least = len(body) // 4 * 3 - 2 if is_base64 else len(body) // 3
    if max_bytes is not None and least > max_bytes:
        raise MediaTooLargeError(field, f"has more than the {max_bytes} bytes that a picture may have")
    try:
        return b64decode(body, validate=True) if is_base64 else unquote_to_bytes(str(body))
    except ValueError as error:  # binascii.Error, or characters that no URL has
        kind = "base64" if is_base64 else "percent-encoded"
        raise UnreadablePictureError(field, f"the data: URL is not {kind}: {error}") from error


def _split(url: str) -> tuple[str, str, str | memoryview]:
    if isinstance(url, LiftedUrl):
        return url.removesuffix(","), ",", url.content
    return url.partition(",")
