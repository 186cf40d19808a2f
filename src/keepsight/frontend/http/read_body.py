"""The body of a request, within its size and its time.

Where the HTTP server offers it, it fills in what comes by itself, and the reader is woken when all has come: passing
each piece on costs more than what is in it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from keepsight.errors import BodyTimeoutError, BodyTooLargeError, ServerOverloadedError, UnsupportedBodyError
from keepsight.frontend.http.waiting_room import WaitingRoom

# An extension of ASGI: what has come and what comes is put into a `Body`; a message follows when all has come.  False:
# nothing more comes, and the next message is there.
COLLECT_BODY = "keepsight.collect_body"
# Less in each pause that a client may make is no way of sending: a few bytes now and then would keep a place for days.
MIN_BYTES_PER_SECOND = 240


@asynccontextmanager
async def reading_body(
    http: Request, room: WaitingRoom, max_bytes: int, pause_seconds: float
) -> AsyncGenerator[bytearray | memoryview, None]:
    """The body counts as read until the context ends: what is made of it is about as large."""
    _check_headers(http, max_bytes)
    body = Body(room, max_bytes)
    try:
        await _read(http, body, pause_seconds)
        yield body.content
    finally:
        body.close()


class Body:
    """Who fills it is not who reads it, so filling raises nothing."""

    def __init__(self, room: WaitingRoom, max_bytes: int) -> None:
        self._room, self._max_bytes = room, max_bytes
        self._fault: Exception | None = None
        self._is_closed = False
        self._added = bytearray()
        # What was added and what else is about to come.
        self._reserved: memoryview | None = None
        self.num_bytes = 0

    @property
    def content(self) -> bytearray | memoryview:
        return self._added if self._reserved is None else self._reserved

    def try_add(self, piece: bytes | bytearray) -> bool:
        """False: no more of it is wanted, which its reader shall learn at once."""
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
        """So many more are about to come, and are then written to `free_part`."""
        is_wanted = not self._is_closed and self._fault is None and self.num_bytes + num_bytes <= self._max_bytes
        if not is_wanted or not self._room.try_reserve_bytes(num_bytes):
            return False  # and may be added as far as there is room
        # Not filled with zeros, which takes as long as what it is filled with.
        self._reserved = np.empty(self.num_bytes + num_bytes, np.uint8).data
        self._reserved[: self.num_bytes] = self._added
        return True

    def free_part(self) -> memoryview:
        """Empty once nobody reads any more."""
        return memoryview(b"") if self._reserved is None else self._reserved[self.num_bytes :]

    def note_filled(self, num_bytes: int) -> None:
        if not self._is_closed:
            self.num_bytes += num_bytes

    def raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """More may still come."""
        self._is_closed = True
        self._room.give_back_bytes(len(self.content))
        self._added, self._reserved = bytearray(), None


async def _read(http: Request, body: Body, pause_seconds: float) -> None:
    # Taken out, so that what the server offers does not keep itself alive.
    collect = http.scope.get("extensions", {}).pop(COLLECT_BODY, None)
    # Most bodies come with their headers, and setting a clock for what is there costs more than to read it.
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
    """Before a byte of the body is read: a client that expects to be told may spare itself the sending."""
    if (encoding := http.headers.get("content-encoding", "identity")) != "identity":
        raise UnsupportedBodyError("body", f"must not be compressed, but Content-Encoding says {encoding[:40]!r}")
    length = http.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        _refuse_size(max_bytes)


def _refuse_size(max_bytes: int) -> None:
    raise BodyTooLargeError("body", f"exceeds {max_bytes} bytes")
