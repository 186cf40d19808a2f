"""Reads the body of a request, within limits of size and time.

If the HTTP server supports it, the server itself fills the body, and wakes the reader when it is complete: passing on
each piece separately costs more than handling its content.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from keepsight.errors import BodyTimeoutError, BodyTooLargeError, ServerOverloadedError, UnsupportedBodyError
from keepsight.frontend.http.waiting_room import WaitingRoom

# An ASGI extension: a function that has received and future data put into a `Body`; a message follows when the body is
# complete. It returns False if nothing more comes and the next message is already there.
COLLECT_BODY = "keepsight.collect_body"
# The slowest rate, over each pause that a client may make: a few bytes now and then would hold a place for days.
MIN_BYTES_PER_SECOND = 240


@asynccontextmanager
async def reading_body(
    http: Request, room: WaitingRoom, max_bytes: int, pause_seconds: float
) -> AsyncGenerator[bytearray | memoryview, None]:
    """Read the body. Its room stays taken until the context exits, as what is made from it is about as large."""
    _check_headers(http, max_bytes)
    room.refuse_if_full()  # rather than when all of the body has come
    body = Body(room, max_bytes)
    try:
        await _read(http, body, pause_seconds)
        yield body.content
    finally:
        body.close()


class Body:
    """A body being received. Filling it never raises, as others than its reader do so; `raise_fault` does."""

    def __init__(self, room: WaitingRoom, max_bytes: int) -> None:
        self._room, self._max_bytes = room, max_bytes
        self._fault: Exception | None = None
        self._is_closed = False
        self._added = bytearray()
        # What was added, and space for the rest.
        self._reserved: memoryview | None = None
        self.num_bytes = 0

    @property
    def content(self) -> bytearray | memoryview:
        return self._added if self._reserved is None else self._reserved

    def try_add(self, piece: bytes | bytearray) -> bool:
        """Append a piece. Return False if no more is wanted, which the reader is to be told at once."""
        if self._is_closed or self._fault is not None:
            return False
        try:
            if self.num_bytes + len(piece) > self._max_bytes:
                _refuse_size(self._max_bytes)
            self._room.take_bytes(len(piece))
        except (BodyTooLargeError, ServerOverloadedError) as fault:
            self._fault = fault
            return False
        self._added += piece
        self.num_bytes += len(piece)
        return True

    def try_reserve(self, num_bytes: int) -> bool:
        """Reserve space for `num_bytes` more, to be written to `free_part`; return False if there is no room."""
        is_wanted = not self._is_closed and self._fault is None and self.num_bytes + num_bytes <= self._max_bytes
        if not is_wanted or not self._room.try_reserve_bytes(num_bytes):
            return False  # pieces may still be added as far as there is room
        # Not filled with zeros, which would take as long as filling in the data.
        self._reserved = np.empty(self.num_bytes + num_bytes, np.uint8).data
        self._reserved[: self.num_bytes] = self._added
        return True

    def free_part(self) -> memoryview:
        """Return the reserved space that is not filled yet; empty once the body is closed."""
        return memoryview(b"") if self._reserved is None else self._reserved[self.num_bytes :]

    def note_filled(self, num_bytes: int) -> None:
        if not self._is_closed:
            self.num_bytes += num_bytes

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Release the memory and the room. Data may still arrive afterwards, and is dropped."""
        self._is_closed = True
        self._room.give_back_bytes(len(self.content))
        self._added, self._reserved = bytearray(), None


async def _read(http: Request, body: Body, pause_seconds: float) -> None:
    # Popped, so that the function does not keep itself alive through the scope.
    collect = http.scope.get("extensions", {}).pop(COLLECT_BODY, None)
    # Most bodies arrive with their headers, and setting a timeout for what is already there costs more than reading it.
    is_there = collect is not None and not collect(body)
    has_more = True
    while has_more:
        body.raise_fault()
        message = await (http.receive() if is_there else _next_message(http, body, pause_seconds))
        is_there = False
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body.try_add(message.get("body", b""))
        has_more = message.get("more_body", False)
    body.raise_fault()


async def _next_message(http: Request, body: Body, pause_seconds: float) -> Message:
    while True:
        num_bytes = body.num_bytes
        try:
            async with asyncio.timeout(pause_seconds):
                return await http.receive()
        except TimeoutError as error:
            came = body.num_bytes - num_bytes
            if came < MIN_BYTES_PER_SECOND * pause_seconds:
                raise BodyTimeoutError("body", f"came too slowly: {came} bytes in {pause_seconds:g} s") from error


def _check_headers(http: Request, max_bytes: int) -> None:
    """Check the headers before any of the body is read: a client that sent `Expect` need not send its body."""
    if (encoding := http.headers.get("content-encoding", "identity")).lower() != "identity":
        raise UnsupportedBodyError("body", f"must not be compressed, but Content-Encoding says {encoding[:40]!r}")
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        _refuse_size(max_bytes)


def _refuse_size(max_bytes: int) -> None:
    raise BodyTooLargeError("body", f"exceeds {max_bytes} bytes")
