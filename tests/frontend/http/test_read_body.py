"""Bodies in pieces, received as ASGI messages or from a server that collects them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from keepsight.errors import BodyTimeoutError, BodyTooLargeError, ServerOverloadedError
from keepsight.frontend.http.read_body import COLLECT_BODY, MIN_BYTES_PER_SECOND, Body, reading_body
from keepsight.frontend.http.waiting_room import WaitingRoom

PAUSE = 0.05
MAX_BYTES = 100


class Server:
    """Has a body's pieces; passes them on one by one, or adds them all before its first message."""

    def __init__(
        self, pieces: list[bytes], collects: bool, ends: bool = True, delay: float = 0.0, is_there: bool = False
    ) -> None:
        self.pieces, self.ends, self.delay, self.is_there = pieces, ends, delay, is_there
        self.body: Body | None = None
        scope: dict[str, Any] = {"type": "http", "headers": []}
        if collects:
            scope["extensions"] = {COLLECT_BODY: self._collect}
        self.request = Request(scope, self._receive)

    def _collect(self, body: Body) -> bool:
        self.body = None if self.is_there else body
        return not self.is_there

    async def _receive(self) -> Message:
        if self.body is not None:
            while self.pieces and self.body.try_add(self.pieces[0]):
                self.pieces.pop(0)
                await asyncio.sleep(self.delay)
            return await self._say(b"", more=bool(self.pieces))
        piece = self.pieces.pop(0) if self.pieces else b""
        return await self._say(piece, more=bool(self.pieces))

    async def _say(self, piece: bytes, more: bool) -> Message:
        if not more and not self.ends:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": piece, "more_body": more}


def read(server: Server, room: WaitingRoom, meanwhile: Callable[[], object] = lambda: None) -> bytes:
    async def run() -> bytes:
        async with reading_body(server.request, room, MAX_BYTES, PAUSE) as body:
            room.check_invariants()
            meanwhile()
            return bytes(body)

    return asyncio.run(run())


@pytest.fixture(params=[False, True], ids=["passed on", "collected"])
def collects(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def room() -> Iterator[WaitingRoom]:
    room = WaitingRoom(1, 150)
    yield room
    assert room.num_bytes == 0, "all that was taken is given back"


def test_pieces_become_the_body(collects: bool, room: WaitingRoom) -> None:
    assert read(Server([b"one", b"two", b"three"], collects), room) == b"onetwothree"


def test_a_body_may_be_empty(collects: bool, room: WaitingRoom) -> None:
    assert read(Server([], collects), room) == b""


def test_a_body_that_is_already_complete_is_read(room: WaitingRoom) -> None:
    assert read(Server([b"all of it"], collects=True, is_there=True), room) == b"all of it"


def test_a_server_with_pieces_left_must_deliver_them(room: WaitingRoom) -> None:
    with pytest.raises(BodyTimeoutError):
        read(Server([b"one", b"two"], collects=True, ends=False, is_there=True), room)


def test_a_body_counts_towards_the_limit_while_it_is_used(collects: bool, room: WaitingRoom) -> None:
    heard: list[int] = []
    read(Server([b"1234", b"56"], collects), room, lambda: heard.append(room.num_bytes))
    assert heard == [6]


def test_a_slow_but_steady_body_is_waited_for(room: WaitingRoom) -> None:
    # Each piece comes within the allowed pause after the previous one; all of them together take longer.
    piece = b"x" * int(MIN_BYTES_PER_SECOND * PAUSE)
    assert read(Server([piece] * 4, collects=True, delay=PAUSE / 2), room) == piece * 4


def test_a_body_sent_byte_by_byte_times_out(room: WaitingRoom) -> None:
    server = Server([b"x"] * 99, collects=True, delay=PAUSE / 5)
    with pytest.raises(BodyTimeoutError):
        read(server, room)
    assert len(server.pieces) > 90


def test_too_large_a_body_is_refused_before_all_of_it_has_come(collects: bool, room: WaitingRoom) -> None:
    server = Server([b"x" * 60] * 9, collects)
    with pytest.raises(BodyTooLargeError):
        read(server, room)
    assert len(server.pieces) >= 7


def test_no_more_is_read_than_there_is_room_for(collects: bool, room: WaitingRoom) -> None:
    room.take_bytes(100)
    with pytest.raises(ServerOverloadedError):
        read(Server([b"x" * 30] * 3, collects), room)
    room.give_back_bytes(100)


def test_a_stalled_body_times_out(collects: bool, room: WaitingRoom) -> None:
    with pytest.raises(BodyTimeoutError):
        read(Server([b"some"], collects, ends=False), room)


def test_a_piece_that_comes_after_reading_ended_is_rejected(room: WaitingRoom) -> None:
    server = Server([b"some"], collects=True, ends=False)
    with pytest.raises(BodyTimeoutError):
        read(server, room)
    assert server.body is not None
    assert not server.body.try_add(b"more")


def test_a_client_that_leaves_is_noticed(collects: bool, room: WaitingRoom) -> None:
    server = Server([b"some"], collects)

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    server.request = Request(server.request.scope, leave)
    with pytest.raises(ClientDisconnect):
        read(server, room)


def test_reserved_bytes_count_and_become_the_body_when_filled(room: WaitingRoom) -> None:
    body = Body(room, MAX_BYTES)
    assert body.try_add(b"four")
    assert body.try_reserve(6)
    assert room.num_bytes == 10
    for piece in (b"more", b"!?"):
        body.free_part()[: len(piece)] = piece
        body.note_filled(len(piece))
    assert (body.num_bytes, bytes(body.content), len(body.free_part())) == (10, b"fourmore!?", 0)
    body.close()


def test_reservations_respect_the_room_and_the_body_limit(room: WaitingRoom) -> None:
    body = Body(room, MAX_BYTES)
    assert not body.try_reserve(76), "half of the room is left to what has come"
    room.take_bytes(20)
    assert not body.try_reserve(60)
    room.give_back_bytes(20)
    assert not Body(WaitingRoom(1, 1000), MAX_BYTES).try_reserve(MAX_BYTES + 1)
    assert body.try_add(b"a piece"), "it is no fault"
    body.raise_fault()
    body.close()


def test_bytes_filled_in_after_reading_ended_are_dropped(room: WaitingRoom) -> None:
    body = Body(room, MAX_BYTES)
    assert body.try_reserve(60)
    body.close()
    assert len(body.free_part()) == 0
    assert not body.try_reserve(1)
