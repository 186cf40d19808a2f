"""The body of a request, within its size and its time."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from keepsight.errors import BodyTimeoutError, BodyTooLargeError, UnsupportedBodyError
from keepsight.frontend.waiting_room import WaitingRoom


@asynccontextmanager
async def reading_body(
    http: Request, room: WaitingRoom, max_bytes: int, pause_seconds: float
) -> AsyncGenerator[bytearray, None]:
    """The body counts as read until the context ends: what is made of it is about as large."""
    _check_headers(http, max_bytes)
    body = bytearray()
    try:
        chunks = aiter(http.stream())
        while (chunk := await _next_chunk(chunks, pause_seconds)) is not None:
            if len(body) + len(chunk) > max_bytes:
                _refuse_size(max_bytes)
            room.take_bytes(len(chunk))
            body += chunk
        yield body
    finally:
        room.give_back_bytes(len(body))


async def _next_chunk(chunks: AsyncIterator[bytes], pause_seconds: float) -> bytes | None:
    try:
        async with asyncio.timeout(pause_seconds):
            return await anext(chunks, None)
    except TimeoutError as error:
        raise BodyTimeoutError("body", f"did not go on for {pause_seconds:g} s") from error


def _check_headers(http: Request, max_bytes: int) -> None:
    """Before a byte of the body is read: a client that expects to be told may spare itself the sending."""
    if (encoding := http.headers.get("content-encoding", "identity")) != "identity":
        raise UnsupportedBodyError("body", f"must not be packed, but Content-Encoding says {encoding[:40]!r}")
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        _refuse_size(max_bytes)


def _refuse_size(max_bytes: int) -> None:
    raise BodyTooLargeError("body", f"exceeds {max_bytes} bytes")
