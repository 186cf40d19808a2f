"""Connections to origin servers: one for each request, closed when its answer was read or is no longer wanted.

None is used again. What an origin sends beyond an answer is thus never taken for the next one, perhaps of another
tenant, and no request meets a connection that its server is about to close.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager

import httpcore

from keepsight.errors import MediaFetchError
from keepsight.frontend.intake.network_guard import GuardedBackend, NetworkGuard
from keepsight.frontend.intake.web_url import UrlFault

# High, because slow connections cost little besides their slots.
MAX_CONNECTIONS = 256
# Of an answer's head, and of all that precedes it: any number of interim answers may (`103 Early Hints`).
MAX_HEAD_BYTES = 2**17
# What one read gets of these is parsed in one go, while other downloads wait.
MAX_HEAD_READ_BYTES = 2**12
# A read of fewer bytes counts as this many, as it costs as much.
LEAST_READ_COST = 64


class Connections:
    """Belongs to the event loop in which it is first used."""

    def __init__(self, guard: NetworkGuard, ssl_context: ssl.SSLContext) -> None:
        self._backend, self._ssl_context = GuardedBackend(guard), ssl_context
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)

    @asynccontextmanager
    async def ask(
        self, url: httpcore.URL, headers: Sequence[tuple[bytes, bytes]]
    ) -> AsyncGenerator[httpcore.Response, None]:
        request = httpcore.Request("GET", url, headers=[*headers, (b"Connection", b"close")])
        async with self._places, aclosing(_OneConnection(self._backend)) as one:
            connection = httpcore.AsyncHTTPConnection(url.origin, self._ssl_context, network_backend=one)
            answer = await connection.handle_async_request(request)
            one.head.is_complete = True
            yield answer


class _Head:
    """What has come of an answer's head, and may still come."""

    def __init__(self) -> None:
        self.is_complete, self._cost = False, 0

    def limit(self, max_bytes: int) -> int:
        """Return how many bytes to read at most."""
        return max_bytes if self.is_complete else min(max_bytes, MAX_HEAD_READ_BYTES)

    def count(self, num_bytes: int) -> None:
        if not self.is_complete:
            self._cost += max(num_bytes, LEAST_READ_COST)
            if self._cost > MAX_HEAD_BYTES:
                raise UrlFault(MediaFetchError, "its server sends too much before the picture")


class _OneConnection(httpcore.AsyncNetworkBackend):
    """Connects once, and can close the connection even if httpcore lost it because its TLS handshake was canceled."""

    def __init__(self, backend: GuardedBackend) -> None:
        self._backend, self.head = backend, _Head()
        self._stream: httpcore.AsyncNetworkStream | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self._stream = await self._backend.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(self._stream, self.head)

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that is read as the head allows."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, head: _Head) -> None:
        self._stream, self._head = stream, head

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = await self._stream.read(self._head.limit(max_bytes), timeout)
        self._head.count(len(data))
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._head)

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)
