"""Reads `data:` URLs: the content is decoded in place from the request's body, or copied once out of its text."""

from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from keepsight.errors import MediaTooLargeError, UnreadablePictureError
from keepsight.frontend.prompt.lift_data_urls import LiftedUrl

b64decode: Callable[..., bytes]
try:
    from pybase64 import b64decode  # 30 times as fast
except ImportError:
    from base64 import b64decode

# What is wrong with a text that has any of these characters.
_FAULTS = {
    ":": "it holds a colon: is it a URL itself?",
    ",": "it holds a comma: one URL has one file, so send a film as it is and not as its frames",
    " \n\r\t": "it holds a line break or a space: send it in one line",
    "%": "it is percent-encoded: send +, / and = as they are",
    "-_": "it holds - or _ of the URL-safe alphabet: send + and / instead",
}


def read_data_url(url: str, field: str, max_bytes: int | None = None) -> bytes:
    head, comma, body = _split(url)
    if not comma:
        raise UnreadablePictureError(field, "the data: URL has no comma, so no content")
    # Browsers accept a space here, too.
    if head.lower().replace(" ", "").endswith(";base64"):
        return decode_base64(body, field, max_bytes, "the data: URL")
    _check_size(len(body) // 3, field, max_bytes)
    try:
        return unquote_to_bytes(str(body))
    except ValueError as error:  # characters that no URL may have
        raise UnreadablePictureError(field, f"the data: URL is not percent-encoded: {error}") from error


def decode_base64(text: str | memoryview, field: str, max_bytes: int | None, what: str) -> bytes:
    _check_size(len(text) // 4 * 3 - 2, field, max_bytes)
    try:
        # Python's base64 accepts any padding after whole groups, pybase64 none.
        if len(text) % 4 or text[-3:] in ("===", b"==="):
            raise ValueError("it does not end with a complete group of four characters")
        return b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error
        raise UnreadablePictureError(field, f"{what} is not base64: {_find_fault(text) or error}") from error


def _find_fault(text: str | memoryview) -> str | None:
    """Describe a common mistake in the text; return None if it has none."""
    content = text if isinstance(text, str) else str(text, "latin-1")
    return next((fault for faulty, fault in _FAULTS.items() if any(each in content for each in faulty)), None)


def _check_size(least: int, field: str, max_bytes: int | None) -> None:
    if max_bytes is not None and least > max_bytes:
        raise MediaTooLargeError(field, f"has more than the {max_bytes} bytes that it may have")


def _split(url: str) -> tuple[str, str, str | memoryview]:
    if isinstance(url, LiftedUrl):
        return url.removesuffix(","), ",", url.content
    return url.partition(",")
