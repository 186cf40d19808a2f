"""A connection to a server behind the router: HTTP/1.1 by h11, one request after the other.

What comes after an answer would be taken for the next one, which may be another client's. So a connection is used again
only if both sides have said all, and nothing has come since: h11, the reader and the kernel have nothing left.
"""

import asyncio
import errno
import re
import select
import socket
import ssl
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import h11

from keepsight import lost_machines
from keepsight.errors import Loss, ReplicaLostError, ServerOverloadedError

CONNECT_SECONDS = 5.0
# A server that takes nothing in for so long is lost. An answer may take any time.
WRITE_SECONDS = 25.0
# Less than servers keep an idle connection (`http_server.IDLE_SECONDS`).
KEEP_SECONDS = 60.0
READ_BYTES = 2**16
# Of an answer's headers.
MAX_HEAD_BYTES = 100 * 1024
# The HTTP server of the router can write no other.
_STATUSES = range(200, 600)
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NOTICE_LOSS = ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(WRITE_SECONDS * 1000)), *lost_machines.PROBES)
# As `getaddrinfo` returns them.
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


class _Reader(asyncio.StreamReader):
    """Unlike asyncio's, gives what came before a connection failed, and the failure after that."""

    # What has come and was not read.
    num_unread = 0
    # Whether anything has come since the last request.
    has_come = False
    _failure: Exception | None = None

    def set_exception(self, exc: Exception) -> None:
        self._failure = exc
        self.feed_eof()

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # as asyncio calls it
        self.num_unread += len(data)
        self.has_come = True
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        piece = await super().read(n)
        if not piece and self._failure is not None:
            raise self._failure
        self.num_unread -= len(piece)
        return piece


class ReplicaConnection:
    def __init__(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._socket = writer.get_extra_info("socket")
        self._h11 = h11.Connection(h11.CLIENT, MAX_HEAD_BYTES)
        self._expires_at = float("inf")

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None) -> "ReplicaConnection":
        """Raises ReplicaLostError; ServerOverloadedError if this process may open no more files."""
        found: Sequence[_Address] = ()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                connection = cls(*await _begin_talking(await _connect(found), host, tls))
            if connection._socket is None:
                raise ConnectionResetError("it closes connections at once")
            for option in _NOTICE_LOSS:
                connection._socket.setsockopt(*option)
        except TimeoutError:
            how: Loss = "silent" if found else "failed"  # that a name is not resolved says nothing of the machine
            raise ReplicaLostError(f"no connection within {CONNECT_SECONDS:g} s", False, how) from None
        except ssl.SSLCertVerificationError as error:
            message = f"its certificate is not trusted: {error.verify_message}"
            raise ReplicaLostError(message, False, "distrusted") from error
        except (OSError, UnicodeError) as error:  # the latter of names that no host can have
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise ServerOverloadedError("the router may open no more files") from error
            how = "gone" if isinstance(error, ConnectionRefusedError) else _how_lost(error)
            raise ReplicaLostError(f"it cannot be reached: {_describe(error)}", False, how) from error
        return connection

    @property
    def is_usable(self) -> bool:
        """Whether the next request can be sent: the server has neither closed it nor sent what nobody asked for."""
        if self._writer.transport.is_closing() or asyncio.get_running_loop().time() > self._expires_at:
            return False
        return not (self._reader.num_unread or self._reader.at_eof() or _is_readable(self._socket))

    async def begin(self, request: h11.Request, body: Iterable[memoryview]) -> h11.Response:
        """Send a request; return the head of its answer. Raises ReplicaLostError."""
        self._reader.has_come = bool(self._reader.num_unread)
        try:
            await self._send(request)
            for piece in body:
                await self._send(h11.Data(data=piece))  # type: ignore[arg-type]  # any buffer will do
            await self._send(h11.EndOfMessage())
        except OSError as error:
            # A server that refuses a body before all has come may have answered. What the kernel says has a number.
            if isinstance(error, TimeoutError) and error.errno is None and not self._reader.num_unread:
                message = f"it takes nothing in for {WRITE_SECONDS:g} s"
                raise ReplicaLostError(message, may_have_begun=True) from None
        while isinstance(event := await self._next_event(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response) or not _can_be_passed_on(event):
            # Without its headers, which may have secrets, and a date: the log has each new reason.
            status = getattr(event, "status_code", None)
            raise ReplicaLostError(f"its answer cannot be passed on (status {status})", may_have_begun=True)
        return event

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of the answer as it comes. Raises ReplicaLostError if it breaks off."""
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    def end(self) -> bool:
        """Make it ready for the next request; if it cannot be used for one, close it and return False."""
        is_over = self._h11.our_state is self._h11.their_state is h11.DONE
        if not is_over or self._h11.trailing_data != (b"", False):
            self.close()
            return False
        self._h11.start_next_cycle()
        self._expires_at = asyncio.get_running_loop().time() + KEEP_SECONDS
        return True

    def close(self) -> None:
        """Close it at once, whatever is still to be sent: so the server learns that nobody wants its answer."""
        self._writer.transport.abort()

    async def _send(self, event: h11.Event) -> None:
        data = self._h11.send(event)
        if self._writer.transport.is_closing():
            raise ConnectionResetError("the connection is closed")  # uvloop's own error is no OSError
        if data:
            self._writer.write(data)
            async with asyncio.timeout(WRITE_SECONDS):
                await self._writer.drain()

    async def _next_event(self) -> h11.Event | type[h11.PAUSED]:
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(READ_BYTES)
                if not data and self._h11.their_state is h11.SEND_RESPONSE:
                    raise ConnectionResetError("it was closed without an answer")
                self._h11.receive_data(data)
        except (h11.RemoteProtocolError, OSError) as error:
            was_closed = isinstance(error, ConnectionError) and not self._reader.has_come
            message = f"the connection failed: {_describe(error)}"
            raise ReplicaLostError(message, True, "closed" if was_closed else _how_lost(error)) from error
        return event  # type: ignore[return-value]  # NEED_DATA is none of them


async def _connect(addresses: Sequence[_Address]) -> socket.socket:
    """Connect to the first of a host's addresses that can be. Each has a part of the time: one may drop packets."""
    loop, failures = asyncio.get_running_loop(), list[OSError]()
    for family, kind, protocol, _, address in addresses:
        with ExitStack() as unless_connected:
            connection = unless_connected.enter_context(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_SECONDS / len(addresses)):
                    await loop.sock_connect(connection, address)
            except OSError as error:
                failures.append(error)
            else:
                unless_connected.pop_all()
                return connection
    # Nobody listens only if all refuse.
    raise min(failures, key=lambda error: isinstance(error, ConnectionRefusedError))


async def _begin_talking(
    connection: socket.socket, host: str, tls: ssl.SSLContext | None
) -> tuple[_Reader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = _Reader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    name = None if tls is None else host
    transport, _ = await loop.create_connection(lambda: protocol, sock=connection, ssl=tls, server_hostname=name)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _how_lost(error: Exception) -> Loss:
    return "silent" if isinstance(error, OSError) and error.errno in lost_machines.FAULTS else "failed"


def _can_be_passed_on(response: h11.Response) -> bool:
    return response.status_code in _STATUSES and not any(_CONTROL.search(value) for _, value in response.headers)


def _is_readable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _describe(error: Exception) -> str:
    return str(error) or repr(error)
