"""A server behind the router, and the connections to it, which are used for one request after the other.

Knows nothing of what is asked. A server may close a connection that was used before at any time, even as a request is
being sent: the request is then sent once more, over a new one. An answer that is not read to its end takes its
connection with it, so that the server learns that nobody wants it.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import httpcore

from keepsight.errors import InvalidArgumentError, ReplicaLostError
from keepsight.frontend.http.decode_body import Buffer
from keepsight.scaleout.affinity import Affinity
from keepsight.scaleout.choose_replica import ReplicaView
from keepsight.scaleout.replica_stream import ReplicaBackend

State = Literal["unknown", "ready", "unready"]
Headers = list[tuple[bytes, bytes]]
# Less than servers keep an idle connection (`http_server.IDLE_SECONDS`).
KEEP_SECONDS = 60.0
# An answer may take any time; a server that takes nothing in for so long is lost.
TIMEOUTS = {"connect": 5.0, "write": 60.0}
PIECE_BYTES = 2**18
# Of answers that the router reads itself: errors, lists, states.
MAX_HELD_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Question:
    """A request as it is sent to a server. `target`: its path, with the query."""

    method: bytes
    target: bytes
    headers: Headers
    body: Buffer = b""

    async def pieces(self) -> AsyncIterator[memoryview]:
        view = memoryview(self.body)
        for at in range(0, len(view), PIECE_BYTES):
            yield view[at : at + PIECE_BYTES]


class Answer:
    """An answer that has begun. It has to be closed."""

    def __init__(self, response: httpcore.Response, on_closed: Callable[[], object]) -> None:
        self.status, self.headers = response.status, response.headers
        self._response, self._on_closed = response, on_closed
        # Its whole body, once it was read.
        self.held: bytes | None = None

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it comes. Raises ReplicaLostError if it breaks off."""
        if self.held is not None:
            yield self.held
            return
        with _naming_losses():
            async for piece in self._response.aiter_stream():
                yield piece

    async def hold(self) -> bytes:
        """Read all of it, and close it: its connection is free for other requests."""
        held = bytearray()
        try:
            async for piece in self.pieces():
                held += piece
                if len(held) > MAX_HELD_BYTES:
                    raise ReplicaLostError(f"it answers more than {MAX_HELD_BYTES} bytes", may_have_begun=True)
        finally:
            await self.aclose()
        self.held = bytes(held)
        return self.held

    def with_body(self, body: bytes) -> "Answer":
        """Return this answer, which was read, with another body."""
        length = (b"content-length", b"%d" % len(body))
        self.headers = [each for each in self.headers if each[0].lower() != b"content-length"] + [length]
        self.held = body
        return self

    async def aclose(self) -> None:
        """Close it at once, even if the server is still answering. May be called again."""
        on_closed, self._on_closed = self._on_closed, bool
        try:
            await self._response.aclose()
        finally:
            on_closed()


class Replica(ReplicaView):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.state: State = "unknown"
        self.was_ready = False
        self._url = httpcore.URL(address)
        self._backend = ReplicaBackend(ssl.create_default_context() if self._url.scheme == b"https" else None)
        # Connections that wait for a request, the last used last.
        self._idle: list[httpcore.AsyncHTTPConnection] = []

    async def ask(self, question: Question, affinity: Affinity | None = None) -> Answer:
        """Return the answer as soon as it begins. Raises ReplicaLostError.

        `affinity`: counts as work in flight, and as known to the server from then on; None: the router's own question.
        """
        if affinity is None:
            return await self._ask(question, bool)
        self.note_sent(affinity)
        try:
            return await self._ask(question, lambda: self.note_ended(affinity))
        except BaseException:
            self.note_ended(affinity)
            raise

    async def close_expired(self) -> None:
        """Close idle connections that are too old, or that the server has closed."""
        expired = [connection for connection in self._idle if connection.has_expired()]
        self._idle = [connection for connection in self._idle if connection not in expired]
        await asyncio.gather(*(connection.aclose() for connection in expired))

    async def close_idle(self) -> None:
        """Close all connections that wait for a request."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(connection.aclose() for connection in idle))

    async def _ask(self, question: Question, on_ended: Callable[[], object]) -> Answer:
        if (used := await self._take_idle()) is not None:
            try:
                return await self._ask_over(used, question, on_ended)
            except ReplicaLostError as lost:
                first_loss = lost
        else:
            first_loss = None
        new = httpcore.AsyncHTTPConnection(
            self._url.origin, keepalive_expiry=KEEP_SECONDS, network_backend=self._backend
        )
        try:
            return await self._ask_over(new, question, on_ended)
        except ReplicaLostError as lost:
            # If nobody listens any more, the first may have been the end of the server.
            raise first_loss or lost from None

    async def _take_idle(self) -> httpcore.AsyncHTTPConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return None

    async def _ask_over(
        self, connection: httpcore.AsyncHTTPConnection, question: Question, on_ended: Callable[[], object]
    ) -> Answer:
        url = httpcore.URL(scheme=self._url.scheme, host=self._url.host, port=self._url.port, target=question.target)
        request = httpcore.Request(
            question.method,
            url,
            headers=question.headers,
            content=question.pieces(),  # type: ignore[arg-type]  # any buffer will do, and copying would take long
            extensions={"timeout": TIMEOUTS},
        )
        with _naming_losses():
            response = await connection.handle_async_request(request)
            if response.status < 200:
                await connection.aclose()
                raise httpcore.RemoteProtocolError(f"it answers with status {response.status}")

        def take_back() -> None:
            if connection.is_idle():  # else httpcore has closed it
                self._idle.append(connection)
            on_ended()

        return Answer(response, take_back)


@contextmanager
def _naming_losses() -> Iterator[None]:
    try:
        yield
    except httpcore.ConnectError as error:
        raise ReplicaLostError(f"it cannot be reached: {error or repr(error)}", may_have_begun=False) from error
    except (httpcore.NetworkError, httpcore.RemoteProtocolError) as error:
        raise ReplicaLostError(f"the connection failed: {error or repr(error)}", may_have_begun=True) from error
    except httpcore.LocalProtocolError as error:
        raise InvalidArgumentError("headers", f"cannot be forwarded: {error}") from error
