"""A server behind the router, and the connections to it, which are used for one request after the other.

Knows nothing of what is asked. A server may close a connection that was used before at any time, even as a request is
being sent: the request is then sent once more, over a new one. After any other failure it is not. An answer that is not
read to its end takes its connection with it.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import h11

from keepsight.errors import InvalidArgumentError, ReplicaLostError
from keepsight.frontend.http.decode_body import Buffer
from keepsight.scaleout.affinity import Affinity
from keepsight.scaleout.choose_replica import ReplicaView
from keepsight.scaleout.replica_connection import ReplicaConnection

Headers = list[tuple[bytes, bytes]]
PIECE_BYTES = 2**18
# Of answers that the router reads itself: errors, lists, states.
MAX_HELD_BYTES = 2**26
# The status of a server that refuses a request which another may take.
NO_ROOM = 503


@dataclass(frozen=True, slots=True)
class Question:
    """A request as it is sent to a server. `target`: its path, with the query."""

    method: bytes
    target: bytes
    headers: Headers
    body: Buffer = b""

    def head(self) -> h11.Request:
        try:
            return h11.Request(method=self.method, target=self.target, headers=self.headers)
        except h11.LocalProtocolError as error:
            raise InvalidArgumentError("headers", f"cannot be forwarded: {error}") from error

    def pieces(self) -> Iterator[memoryview]:
        view = memoryview(self.body)
        return (view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES))


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that was read to its end."""

    status: int
    headers: Headers
    body: bytes

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        yield self.body

    def with_body(self, body: bytes) -> "WholeAnswer":
        headers = [each for each in self.headers if each[0].lower() != b"content-length"]
        return replace(self, headers=[*headers, (b"content-length", b"%d" % len(body))], body=body)

    def close(self) -> None:
        """Nothing is left to be closed."""


class Answer:
    """An answer that has begun. It has to be closed."""

    def __init__(self, response: h11.Response, connection: ReplicaConnection) -> None:
        self.status, self.headers = response.status_code, response.headers.raw_items()
        self._connection: ReplicaConnection | None = connection
        # What is to be done when it is closed.
        self.on_closed = ExitStack()

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes. Raises ReplicaLostError if it breaks off."""
        assert self._connection is not None, "its connection may be another answer's by now"
        return self._connection.pieces()

    async def hold(self) -> WholeAnswer:
        """Read all of it, and close it: its connection is free for other requests."""
        body = bytearray()
        with closing(self):
            async for piece in self.pieces():
                body += piece
                if len(body) > MAX_HELD_BYTES:
                    raise ReplicaLostError(f"it answers more than {MAX_HELD_BYTES} bytes", may_have_begun=True)
        return WholeAnswer(self.status, self.headers, bytes(body))

    def close(self) -> None:
        """Close it at once, even if the server is still answering. May be called again."""
        self._connection = None
        self.on_closed.close()


class Replica(ReplicaView):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.is_ready = self.was_ready = False
        # Why it is ready, or not.
        self.reason = ""
        # Digests of what it serves, by what they are of, as it told last.
        self.serves: Mapping[str, str] = {}
        url = urlsplit(address)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host, self._port = url.hostname or "", url.port or (80 if self._tls is None else 443)
        # Connections that wait for a request, the last used last.
        self._idle: list[ReplicaConnection] = []
        self._keeps_idle = True
        # Of the questions whose answers have not begun, or are refusals that are being read.
        self._patience = set[asyncio.Timeout]()

    async def ask(self, question: Question) -> Answer:
        """Return the answer as soon as it begins. Raises ReplicaLostError."""
        async with self._patiently():
            return await self._ask(question)

    async def forward(self, question: Question, affinity: Affinity) -> Answer | WholeAnswer:
        """Ask what a client does: it counts as work in flight, and its media as known here once they are taken.

        A refusal is returned whole, any other answer as soon as it begins.
        """
        self.note_sent(affinity)
        try:
            async with self._patiently():
                answer = await self._ask(question)
                refusal = await answer.hold() if answer.status == NO_ROOM else None
        except BaseException:
            self.note_ended(affinity)
            raise
        if refusal is not None:
            self.note_ended(affinity)
            return refusal
        answer.on_closed.callback(self.note_ended, affinity)
        if answer.status < 400:
            self.note_taken(affinity)
        return answer

    @asynccontextmanager
    async def _patiently(self) -> AsyncIterator[None]:
        """Wait until it is given up. Raises ReplicaLostError then."""
        try:
            async with asyncio.timeout(None) as patience:
                self._patience.add(patience)
                try:
                    yield
                finally:
                    self._patience.discard(patience)
        except TimeoutError:
            raise ReplicaLostError("it was given up, as it hangs or cannot be reached", True, "silent") from None

    def give_up(self) -> None:
        """Have all questions fail whose answers have not begun: the server hangs, or cannot be reached."""
        given_up, self._patience = self._patience, set()
        for each in given_up:
            each.reschedule(0)

    def close_unusable(self) -> None:
        """Close idle connections that are too old, that the server has closed, or that it has sent something over."""
        idle, self._idle = self._idle, []
        for connection in idle:
            if connection.is_usable:
                self._idle.append(connection)
            else:
                connection.close()

    def close_idle(self) -> None:
        """Close all connections that wait for a request, and from now on each once its answer has ended."""
        self._keeps_idle = False
        while self._idle:
            self._idle.pop().close()

    async def _ask(self, question: Question) -> Answer:
        head, was_closed = question.head(), False
        if (used := self._take_idle()) is not None:
            try:
                return await self._ask_over(used, head, question)
            except ReplicaLostError as lost:
                if lost.how != "closed":
                    raise
                was_closed = True
        try:
            new = await ReplicaConnection.open(self._host, self._port, self._tls)
            return await self._ask_over(new, head, question)
        except ReplicaLostError as lost:
            # If nobody listens any more, the first may have been the end of the server.
            lost.may_have_begun |= was_closed
            raise

    def _take_idle(self) -> ReplicaConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    async def _ask_over(self, connection: ReplicaConnection, head: h11.Request, question: Question) -> Answer:
        try:
            response = await connection.begin(head, question.pieces())
        except BaseException:
            connection.close()
            raise
        answer = Answer(response, connection)
        answer.on_closed.callback(self._take_back, connection)
        return answer

    def _take_back(self, connection: ReplicaConnection) -> None:
        if not connection.end():
            return
        if self._keeps_idle:
            self._idle.append(connection)
        else:
            connection.close()
