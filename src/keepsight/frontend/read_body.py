"""The body of a request, within its size and its time.

Where the HTTP server offers it, its pieces are added here as they come, and the reader is woken when all have: passing
each on by itself costs more than what is in it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from keepsight.errors import BodyTimeoutError, BodyTooLargeError, ServerOverloadedError, UnsupportedBodyError
from keepsight.frontend.waiting_room import WaitingRoom

# False: no more of it is wanted, which its reader shall learn at once.
AddPiece = Callable[[bytes | bytearray], bool]
# An extension of ASGI: what has come and what comes are given to an `AddPiece`; a message follows when all have.
COLLECT_BODY = "keepsight.collect_body"


@asynccontextmanager
async def reading_body(
    http: Request, room: WaitingRoom, max_bytes: int, pause_seconds: float
) -> AsyncGenerator[bytearray, None]:
    """The body counts as read until the context ends: what is made of it is about as large."""
    _check_headers(http, max_bytes)
    body = _Body(room, max_bytes)
    try:
        await _read(http, body, pause_seconds)
        yield body.content
    finally:
        body.close()


class _Body:
    def __init__(self, room: WaitingRoom, max_bytes: int) -> None:
        self._room, self._max_bytes = room, max_bytes
        self._fault: Exception | None = None
        self._is_closed = False
        self.content = bytearray()

    def try_add(self, piece: bytes | bytearray) -> bool:
        """Raises nothing: who adds is not who reads."""
        if self._is_closed or self._fault is not None:
            return False
        try:
            if len(self.content) + len(piece) > self._max_bytes:
                _refuse_size(self._max_bytes)
            self._room.take_bytes(len(piece))
        except (BodyTooLargeError, ServerOverloadedError) as fault:
            self._fault = fault
            return False
        self.content += piece
        return True

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Pieces may still come."""
        self._is_closed = True
        self._room.give_back_bytes(len(self.content))


async def _read(http: Request, body: _Body, pause_seconds: float) -> None:
    # Taken out, so that what the server offers does not keep itself alive.
    collect = http.scope.get("extensions", {}).pop(COLLECT_BODY, None)
    if collect is not None:
        collect(body.try_add)
    has_more = True
    while has_more:
        body.raise_fault()
        message = await _next_message(http, body, pause_seconds)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body.try_add(message.get("body", b""))
        has_more = message.get("more_body", False)
    body.raise_fault()


async def _next_message(http: Request, body: _Body, pause_seconds: float) -> Message:
    while True:
        num_bytes = len(body.content)
        try:
            async with asyncio.timeout(pause_seconds):
                return await http.receive()
        except TimeoutError as error:
            if len(body.content) == num_bytes:
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
