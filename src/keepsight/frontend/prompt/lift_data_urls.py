"""Keeps large `data:` URLs in the bytes of the request's body.

They are cut out of the JSON before it is decoded, and put back as views of the body where a message has a picture. So
their megabytes are neither scanned for escapes nor copied into a string. If one is anywhere else, or anything is wrong,
the body is decoded as it is: the client sees no difference. Bare base64 in a field `data` (of Anthropic's API, and of
OpenAI's sounds) is lifted in the same way.
"""

import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.decode_body import PIECE_BYTES, BodyDecoder, Buffer

MIN_BYTES = 4096
MAX_HEAD_BYTES = 128
# More than any prompt has pictures. Further strings stay in the JSON: each, however short, costs two pieces.
MAX_STRINGS = 1024
# The fields of a content part that may hold a URL.
_PLACES = ("image_url", "image", "url", "image_embeds", "video_url", "video", "audio_url", "audio", "data", "file_data")
# The fields of a content part that are objects, and the field of each that holds it.
_INNER_PLACES = {
    **dict.fromkeys(("image_url", "video_url", "audio_url"), "url"),
    **dict.fromkeys(("input_audio", "source"), "data"),
    "file": "file_data",
}
_OPENING, _MARKER = b'"data', b";base64,"
_FIELD = re.compile(rb'"data"\s*:\s*"')


class LiftedUrl(str):
    """A URL that is a string only up to and including its comma; `content`, the rest, is a view of the body."""

    content: memoryview

    @classmethod
    def of(cls, url: memoryview) -> "LiftedUrl":
        head = bytes(url[:MAX_HEAD_BYTES])
        length = head.index(_MARKER) + len(_MARKER)
        return cls.behind(head[:length].decode("ascii"), url[length:])

    @classmethod
    def behind(cls, head: str, content: memoryview) -> "LiftedUrl":
        lifted = cls(head)
        lifted.content = content
        return lifted


def length_of(url: str) -> int:
    """Return the length of a URL as it was sent."""
    return len(url) + (len(url.content) if isinstance(url, LiftedUrl) else 0)


def as_data_url(media_type: str, data: str) -> str:
    """Return the data URL of some base64, lifted or not; what is one already, as it is."""
    if data[:5].lower() == "data:":
        return data
    head = f"data:{media_type}{_MARKER.decode()}"
    return LiftedUrl.behind(head, data.content) if isinstance(data, LiftedUrl) else head + data


Body = TypeVar("Body", bound=msgspec.Struct)


def decode_lifting(decoder: BodyDecoder[Body], body: Buffer, field: str = "messages") -> Body:
    """Decode a body and keep its large URLs in it. `field`: the one that has its messages, or items."""
    text, lifted = _lift(body)
    if lifted:
        with suppress(InvalidArgumentError):
            request = decoder.decode(text)
            if _put_back(getattr(request, field), lifted):
                return request
    return decoder.decode(body)


def _lift(body: Buffer) -> tuple[Buffer, dict[str, LiftedUrl]]:
    """Return the body with an unguessable word in place of each large URL, and the URLs by these words."""
    prefix = f"data:{secrets.token_hex(16)}-"
    lifted: dict[str, LiftedUrl] = {}

    def name(url: LiftedUrl) -> str:
        word = f"{prefix}{len(lifted)}"
        lifted[word] = url
        return word

    return replace_urls(body, name), lifted


def replace_urls(body: Buffer, name: Callable[[LiftedUrl], str]) -> Buffer:
    """Return the body with a name in place of each large URL, or of bare base64; the body itself if it has none."""
    view, kept = memoryview(body), 0
    pieces: list[bytes | memoryview] = []
    for begin, end, is_bare in _find_urls(view):
        url = view[begin:end]
        pieces += [view[kept:begin], name(LiftedUrl.behind("", url) if is_bare else LiftedUrl.of(url)).encode()]
        kept = end
    return b"".join([*pieces, view[kept:]]) if pieces else body


def _find_urls(body: memoryview) -> Iterator[tuple[int, int, bool]]:
    """Yield where each URL begins and ends, inside its quotes, and whether it is bare base64.

    A quote without a backslash before it opens or closes a string, and `data` after a closing quote is not JSON, with
    or without the URL. So what is found is a whole string, if it has no backslash. The same holds for a field's name.
    """
    end = 0
    for _ in range(MAX_STRINGS):
        quote = _find(body, _OPENING, end)
        if quote < 0:
            return
        field = _FIELD.match(body[quote : quote + MAX_HEAD_BYTES])
        begin = quote + (1 if field is None else field.end())
        end, has_backslash = _find_end(body, begin)
        if end < 0:
            return
        if end - begin < MIN_BYTES or has_backslash or _is_escaped(body, quote):
            continue
        head = bytes(body[begin : begin + MAX_HEAD_BYTES])
        is_bare = field is not None and b":" not in head  # otherwise it is a URL
        if is_bare or _has_marker(head):
            yield begin, end, is_bare


def _find(body: memoryview, what: bytes, begin: int) -> int:
    for at in range(begin, len(body), PIECE_BYTES):
        found = bytes(body[at : at + PIECE_BYTES + len(what) - 1]).find(what)
        if found >= 0:
            return at + found
    return -1


def _find_end(body: memoryview, begin: int) -> tuple[int, bool]:
    """Return the place of the next quote (or -1) and whether a backslash precedes it, in one pass over the memory."""
    has_backslash = False
    for at in range(begin, len(body), PIECE_BYTES):
        piece = bytes(body[at : at + PIECE_BYTES])
        quote = piece.find(b'"')
        has_backslash = has_backslash or piece.find(b"\\", 0, quote if quote >= 0 else len(piece)) >= 0
        if quote >= 0:
            return at + quote, has_backslash
    return -1, has_backslash


def _is_escaped(body: memoryview, quote: int) -> bool:
    return quote >= 1 and bytes(body[quote - 1 : quote]) == b"\\"


def _has_marker(head: bytes) -> bool:
    marker = head.find(_MARKER)
    return head.startswith(b"data:") and marker >= 0 and head[:marker].isascii()


def _put_back(messages: object, lifted: dict[str, LiftedUrl]) -> bool:
    """Put the URLs back in place of their words; return whether all words were found."""
    missing = dict(lifted)
    for place, key in _find_places(messages):
        if isinstance(place[key], str) and (url := missing.pop(place[key], None)) is not None:
            place[key] = url
    return not missing


def _find_places(messages: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each object and key that may hold the URL of a picture."""
    for message in messages if isinstance(messages, list) else ():
        for part in _find_parts(message):
            yield from ((part, key) for key in _PLACES if key in part)
            for outer, key in _INNER_PLACES.items():
                # The `data` of a text is not base64.
                if isinstance(inner := part.get(outer), dict) and key in inner and inner.get("type") != "text":
                    yield inner, key


def _find_parts(message: object) -> Iterator[dict[str, Any]]:
    """Yield a message's parts, each followed by those within it if it is a tool's result."""
    for part in _list_parts(message):
        yield part
        yield from _list_parts(part)


def _list_parts(holder: object) -> Iterator[dict[str, Any]]:
    contents = (holder.get("content"), holder.get("output")) if isinstance(holder, dict) else ()
    listed = itertools.chain.from_iterable(each for each in contents if isinstance(each, list))
    return (part for part in listed if isinstance(part, dict))
