"""Plays drawn sessions against a server of its own over real sockets, and judges what is answered and what is left."""

import asyncio
import gc
import hashlib
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import patch

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from keepsight.api_settings import ApiSettings
from keepsight.frontend.http import lookout, slow_client_limits
from keepsight.frontend.http.http_server import make_server
from keepsight.frontend.http.read_body import reading_body
from keepsight.frontend.http.waiting_room import WaitingRoom
from tests.frontend.http.drawn_sessions import Asked, Invalid, Session, content_of, draw_session
from tests.frontend.http.fixed_sessions import FIXED
from tests.frontend.http.fuzz_connection import NARROW_BYTES, FuzzConnection, TlsFuzzConnection

PEM = Path(__file__).parents[1] / "pictures_test.pem"
# Much longer than anything takes, so that a connection that hangs is told from one that is slow.
PATIENCE = 60.0
NUM_AT_ONCE = 12
ROOM_BYTES = 2**28
# Shorter than what clients do, so that they meet them.
SECONDS_BETWEEN_LOOKS = 0.03


class FuzzedServer:
    """A server whose app answers by the request alone, and what it logs."""

    def __init__(self, *, loop: str = "asyncio", is_tls: bool = False, has_h11: bool = False) -> None:
        """With `has_h11`, the caller has replaced uvicorn's protocol by h11's."""
        self.is_tls, self.has_h11 = is_tls, has_h11
        # Once told to close, asyncio's TLS takes whatever arrives for a fault, and drops the rest of the answer.
        self.may_get_more_when_closing = not (is_tls and loop == "asyncio")
        certificate = str(PEM) if is_tls else None
        # Longer than it is waited for what is left, so that a timer of such a limit is seen.
        limit = 10 * PATIENCE
        self._server = make_server(self, ApiSettings(ssl_certfile=certificate, slow_client_seconds=limit))
        self._server.config.loop = loop
        self._room = WaitingRoom(1000, ROOM_BYTES)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log = _Log()
        self.logged_faults = self._log.faults
        self.port = self.narrow_port = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        root = logging.getLogger()
        with (
            patch.object(slow_client_limits, "SECONDS_BETWEEN_LOOKS", SECONDS_BETWEEN_LOOKS),
            patch.object(lookout, "SECONDS_BETWEEN_LOOKOUTS", SECONDS_BETWEEN_LOOKS),
            socket.create_server(("127.0.0.1", 0), backlog=128) as wide,
            socket.create_server(("127.0.0.1", 0), backlog=128) as narrow,
        ):
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW_BYTES)  # its connections inherit it
            self.port, self.narrow_port = wide.getsockname()[1], narrow.getsockname()[1]
            thread = threading.Thread(target=self._server.run, kwargs={"sockets": [wide, narrow]})
            root.addHandler(self._log)
            thread.start()
            try:
                yield
            finally:
                self._server.should_exit = True
                thread.join(PATIENCE)
                root.removeHandler(self._log)
                assert not thread.is_alive()

    async def check_nothing_is_left(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while self._left():
                    await asyncio.sleep(0.01)
        assert not self._left(), self._left()
        self._room.check_invariants()
        assert (self._room.num_requests, self._room.num_bytes) == (0, 0)
        assert not self.logged_faults, "\n".join(self.logged_faults)

    def _left(self) -> list[object]:
        """Return connections, tasks and timers, without the server's own tick. (uvloop does not tell its timers.)"""
        state, scheduled = self._server.server_state, list(getattr(self._loop, "_scheduled", ()))
        timers = [each for each in scheduled if not each.cancelled() and "Timeout" not in repr(each)]
        return [*state.connections, *state.tasks, *timers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        # With h11, the path of a URL with a host is the whole URL, and a CONNECT, which has no path, comes here too.
        path = scope["path"].removesuffix("/close").split("/")[-4:]
        if len(path) < 4:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body"})
            return
        mode, name, size, num_pieces = path
        with suppress(ClientDisconnect):
            digest = await self._read(mode, Request(scope, receive), receive)
            assert b"x-sum" not in dict(scope["headers"]), "trailers are no headers"
            is_last = scope["path"].endswith("/close")
            await _answer(send, name, digest, content_of(name, digest, int(size)), int(num_pieces), is_last=is_last)

    async def _read(self, mode: str, http: Request, receive: Receive) -> str:
        if mode == "unread":
            return "unknown"
        if mode == "partly":
            if (await receive())["type"] == "http.disconnect":
                raise ClientDisconnect
            return "unknown"
        if mode == "held":
            while (await receive())["type"] != "http.disconnect":
                pass
            raise ClientDisconnect
        if mode == "received":
            return hashlib.sha256(await http.body()).hexdigest()
        async with reading_body(http, self._room, ROOM_BYTES, PATIENCE) as body:
            with self._room.admit():
                return hashlib.sha256(body).hexdigest()


async def _answer(send: Send, name: str, digest: str, content: bytes, num_pieces: int, *, is_last: bool) -> None:
    """Answer in one piece with its length, or stream."""
    headers = [(b"x-name", name.encode()), (b"x-digest", digest.encode()), *[(b"connection", b"close")] * is_last]
    if not num_pieces:
        headers.append((b"content-length", str(len(content)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    length = len(content) // max(num_pieces, 1) + 1
    for start in range(0, len(content), length):
        message: Message = {"type": "http.response.body", "body": content[start : start + length], "more_body": True}
        await send(message)
        await asyncio.sleep(0)
    await send({"type": "http.response.body"})


class _Log(logging.Handler):
    """Collects what must not happen."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR or record.name == "asyncio":
            traceback = logging.Formatter().formatException(record.exc_info) if record.exc_info else ""
            self.faults.append(f"{record.name}: {record.getMessage()} {traceback}")


# The client ----------------------------------------------------------------------------------------------------


class WrongAnswerError(AssertionError):
    pass


class _Player:
    def __init__(self, server: FuzzedServer, session: Session) -> None:
        self._server, self._session = server, session
        # Set once all is sent, and for each answer that has begun, 100 Continue included.
        self._all_is_sent = asyncio.Event()
        invalid = session.invalid.may_be_answered if session.invalid is not None else None
        self._begun = {each.name: asyncio.Event() for each in (*session.asked, *filter(None, [invalid]))}
        make = TlsFuzzConnection if server.is_tls else FuzzConnection
        self._connection = make(self._pace, is_narrow=session.is_narrow)
        self._num_received = 0
        self.num_answers = self.num_refusals = self.num_ends = 0

    async def play(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE * 2 / 3):
                await self._connection.connect(
                    self._server.narrow_port if self._session.is_narrow else self._server.port
                )
                async with asyncio.TaskGroup() as group:
                    judging = group.create_task(self._judge())
                    group.create_task(self._send(judging))
        finally:
            self._connection.close(is_reset=self._session.ending in ("reset", "drop"))

    # Sending

    async def _send(self, judging: "asyncio.Task[None]") -> None:
        session = self._session
        try:
            if session.is_at_once:
                await self._send_in_pieces(b"".join(each.head + each.sent_body for each in session.asked))
            else:
                await self._send_one_by_one()
            if session.behind and self._server.may_get_more_when_closing:
                await self._begun[session.asked[-1].name].wait()
                await self._send_in_pieces(session.behind)
            if session.invalid is not None:
                await self._send_invalid(session.invalid)
        except _CutError:
            pass
        except (ConnectionError, ssl.SSLError) as error:
            if session.is_judged_whole and session.invalid is None and not self._may_be_cut():
                raise WrongAnswerError(f"cut off while it sent: {error!r}") from error
        self._all_is_sent.set()
        if session.is_answered_first:
            await self._begun[session.asked[0].name].wait()
        if session.ending == "fin":
            with suppress(OSError):
                await self._connection.end_sending()
        elif not session.is_judged_whole:
            judging.cancel()

    async def _send_one_by_one(self) -> None:
        session = self._session
        for each in session.asked:
            # h11 refuses empty lines before a request.
            await self._send_in_pieces(each.head.lstrip() if self._server.has_h11 else each.head)
            if each.expects and session.is_patient and each.sent_body and session.cut is None:
                await self._begun[each.name].wait()
            await self._send_in_pieces(each.sent_body)

    async def _send_invalid(self, invalid: Invalid) -> None:
        await self._send_in_pieces(invalid.sent)
        if invalid.rest and invalid.may_be_answered is not None:
            await self._begun[invalid.may_be_answered.name].wait()
            await self._send_in_pieces(invalid.rest)

    async def _send_in_pieces(self, data: bytes) -> None:
        session, number = self._session, 0
        while data:
            length = session.pieces[number % len(session.pieces)]
            number += 1
            piece, data = data[:length], data[length:]
            if session.cut is not None:
                piece = piece[: session.cut]
                session.cut -= len(piece)
            await self._connection.send(piece)
            await asyncio.sleep(0.001 if session.pauses and number < 30 else 0)
            if session.cut == 0:
                raise _CutError

    # Judging

    async def _judge(self) -> None:
        session = self._session
        try:
            for each in session.asked:
                await self._read_answer(each)
            if session.invalid is not None:
                await self._read_refusal(session.invalid)
            elif session.ending == "finish":
                await self._read_end(is_early=self._is_last_early)
        except (ConnectionError, ssl.SSLError, asyncio.IncompleteReadError) as error:
            if session.is_judged_whole and not self._may_be_cut():
                raise WrongAnswerError(f"cut off after {self.num_answers} answers: {error!r}") from error
        for begun in self._begun.values():
            begun.set()

    @property
    def _is_last_early(self) -> bool:
        """True if the last request may be answered before it is complete; over TLS the client then has to close."""
        return self._session.asked[-1].is_early

    def _may_be_cut(self) -> bool:
        """h11's protocol closes at once, and the kernel then resets the connection if the client still sends."""
        session = self._session
        may_send_on = session.invalid is not None or (session.asked[-1].closes and self._is_last_early)
        return self._server.has_h11 and may_send_on

    async def _pace(self) -> None:
        session = self._session
        self._num_received += 1
        if session.reading == "late":
            await self._all_is_sent.wait()
        elif session.reading == "bursts" and self._num_received < 30:
            await asyncio.sleep(0.002)
        if self._num_received == 2:
            await asyncio.sleep(session.pause_seconds)

    async def _read_head(self) -> tuple[int, dict[bytes, bytes]]:
        head = await self._connection.read_until(b"\r\n\r\n")
        first, *lines = head[:-4].split(b"\r\n")
        version, status, _ = first.split(b" ", 2)
        if version != b"HTTP/1.1":
            raise WrongAnswerError(first)
        return int(status), {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}

    async def _read_answer(self, asked: Asked) -> None:
        status, headers = await self._read_head()
        self._begun[asked.name].set()
        if status == 100 and asked.expects and not headers:
            status, headers = await self._read_head()
        if status != 200 or headers[b"x-name"].decode() != asked.name:
            raise WrongAnswerError(f"{asked.name}: {status} {headers}")
        if headers[b"x-digest"].decode() != asked.digest:
            raise WrongAnswerError(f"{asked.name}: the body was read wrongly")
        if asked.is_old and b"transfer-encoding" in headers:
            raise WrongAnswerError(f"{asked.name}: chunks for a client of HTTP/1.0")
        await self._check_content(asked, headers)
        self.num_answers += 1

    async def _check_content(self, asked: Asked, headers: dict[bytes, bytes]) -> None:
        content = await self._read_content(asked, headers)
        if content != (b"" if asked.method == "HEAD" else content_of(asked.name, asked.digest, asked.size)):
            raise WrongAnswerError(f"{asked.name}: {len(content)} of {asked.size} bytes")

    async def _read_content(self, asked: Asked, headers: dict[bytes, bytes]) -> bytes:
        connection, content = self._connection, bytearray()
        if asked.method == "HEAD":
            return b""
        if b"content-length" in headers:
            return await connection.read_exactly(int(headers[b"content-length"]))
        if b"transfer-encoding" not in headers and self._server.is_tls and self._is_last_early:
            return await connection.read_exactly(asked.size)
        if b"transfer-encoding" not in headers:
            content += await connection.read_to_end()
            if not self._session.is_judged_whole and len(content) < asked.size:
                raise asyncio.IncompleteReadError(bytes(content), asked.size)
            return bytes(content)
        while length := int(await connection.read_until(b"\r\n"), 16):
            content += await connection.read_exactly(length)
            if await connection.read_exactly(2) != b"\r\n":
                raise WrongAnswerError("a chunk without end")
        await connection.read_exactly(2)
        return bytes(content)

    async def _read_refusal(self, invalid: Invalid) -> None:
        status, headers = await self._read_head()
        if status in (200, 404) and invalid.is_disputed and self._server.has_h11:
            return
        asked = invalid.may_be_answered
        if status == 200 and asked is not None and asked.is_early:
            self._begun[asked.name].set()
            if headers[b"x-name"].decode() != asked.name:
                raise WrongAnswerError(f"{asked.name}: {headers}")
            await self._check_content(asked, headers)
            if self._server.is_tls and asked.closes:  # no refusal follows, and no end before the client's
                await self._read_end(is_early=True)
                return
            try:
                status, headers = await self._read_head()
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                if isinstance(error, asyncio.IncompleteReadError) and error.partial:
                    raise WrongAnswerError(error.partial) from error
                if not (self._server.has_h11 or asked.closes):
                    raise WrongAnswerError(f"{asked.name}: no refusal follows its answer") from error
                return
        if not 400 <= status < 500 or headers[b"connection"] != b"close":
            raise WrongAnswerError(f"what is invalid is answered with {status} {headers}")
        await self._connection.read_exactly(int(headers[b"content-length"]))
        self.num_refusals += 1
        await self._read_end(is_early=True)

    async def _read_end(self, *, is_early: bool) -> None:
        """With `is_early`, the server reads on what is still sent, so over TLS the client has to close."""
        if is_early and self._server.is_tls:
            await self._all_is_sent.wait()
            await self._connection.end_sending()
        if more := await self._connection.read_to_end():
            raise WrongAnswerError(f"something follows the last answer: {more[:1000]!r}")
        await self._connection.wait_until_closed(ends_tls=self._session.ends_tls)
        self.num_ends += 1


class _CutError(Exception):
    """The client has sent all that it wants to."""


async def _play_all(server: FuzzedServer, seed: int, numbers: range) -> Counter[str]:
    limit, counts, faults = asyncio.Semaphore(NUM_AT_ONCE), Counter[str](), list[str]()

    async def play(name: str, make: Callable[[], Session]) -> None:
        async with limit:
            player = _Player(server, make())
            try:
                await player.play()
            except Exception as fault:
                reasons = fault.exceptions if isinstance(fault, ExceptionGroup) else [fault]
                faults.extend(f"{name}: {reason!r}" for reason in reasons)
        counts.update(sessions=1, answers=player.num_answers, refusals=player.num_refusals, ends=player.num_ends)

    fixed = [play(make.__name__, make) for make in FIXED]
    drawn = [play(f"seed {seed}, session {each}", partial(_draw, seed, each)) for each in numbers]
    await asyncio.gather(*fixed, *drawn)
    assert not faults, "\n".join([*faults, *server.logged_faults])
    gc.collect()
    await server.check_nothing_is_left()
    return counts


def _draw(seed: int, number: int) -> Session:
    return draw_session(Random(f"{seed} {number}"))


def fuzz(server: FuzzedServer, seed: int, numbers: range) -> Counter[str]:
    """Play the fixed sessions and these; return how many there were, with how many answers, refusals and ends."""
    with server.running():
        return asyncio.run(_play_all(server, seed, numbers))
