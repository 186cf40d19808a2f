"""Large `data:` URLs stay where they came: in the bytes of the body.

They are cut out of the JSON before it is decoded, and put back as views of the body where a message has a picture.  So
their megabytes are neither scanned for escapes nor copied into a string.  If one stands elsewhere, or anything is
wrong, the body is decoded as it is: what a caller sees is the same.
"""

import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.decode_body import BodyDecoder

MIN_BYTES = 4096
MAX_HEAD_BYTES = 128
_OPENING, _MARKER = b'"data:', b";base64,"


class LiftedUrl(str):
    """The text is what stands before the comma and the comma; `content`, what follows, lies in the body."""

    content: memoryview

    @classmethod
    def of(cls, url: memoryview) -> "LiftedUrl":
        head = bytes(url[:MAX_HEAD_BYTES])
        length = head.index(_MARKER) + len(_MARKER)
        lifted = cls(head[:length].decode("ascii"))
        lifted.content = url[length:]
        return lifted


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_lifting(decoder: BodyDecoder[Body], body: bytearray | bytes) -> Body:
    """For bodies with `messages`."""
    text, lifted = _lift(body)
    if lifted:
        with suppress(InvalidArgumentError):
            request = decoder.decode(text)
            if _put_back(request.messages, lifted):  # type: ignore[attr-defined]
                return request
    return decoder.decode(body)


def _lift(body: bytearray | bytes) -> tuple[bytes, dict[str, LiftedUrl]]:
    """The body with a word in place of each large URL, and the URLs by these words, which nobody can guess."""
    word = f"data:{secrets.token_hex(16)}-"
    view, kept = memoryview(body), 0
    pieces: list[bytes | memoryview] = []
    lifted: dict[str, LiftedUrl] = {}
    for begin, end in _find_urls(body):
        name = f"{word}{len(lifted)}"
        lifted[name] = LiftedUrl.of(view[begin:end])
        pieces += [view[kept:begin], name.encode()]
        kept = end
    return b"".join([*pieces, view[kept:]]) if lifted else b"", lifted


def _find_urls(body: bytearray | bytes) -> Iterator[tuple[int, int]]:
    """Where they begin and end, inside their quotes.

    A quote that no backslash precedes opens a string or closes one, and after a closing one `data:` is no JSON, with or
    without the URL.  So what is found is a whole string, if it has no backslash.
    """
    end = 0
    while (quote := body.find(_OPENING, end)) >= 0:
        begin = quote + 1
        end = body.find(b'"', begin)
        if end < 0:
            return
        if end - begin >= MIN_BYTES and _can_lift(body, begin, end):
            yield begin, end


def _can_lift(body: bytearray | bytes, begin: int, end: int) -> bool:
    is_escaped = begin >= 2 and body[begin - 2 : begin - 1] == b"\\"
    marker = body.find(_MARKER, begin, begin + MAX_HEAD_BYTES)
    return not is_escaped and marker >= 0 and body[begin:marker].isascii() and body.find(b"\\", begin, end) < 0


def _put_back(messages: object, lifted: dict[str, LiftedUrl]) -> bool:
    """Whether all have found their places."""
    missing = dict(lifted)
    for place, key in _find_places(messages):
        if isinstance(place[key], str) and (url := missing.pop(place[key], None)) is not None:
            place[key] = url
    return not missing


def _find_places(messages: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a message may have the URL of a picture."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield from ((part, key) for key in ("image_url", "image", "url") if key in part)
                if isinstance(inner := part.get("image_url"), dict) and "url" in inner:
                    yield inner, "url"
