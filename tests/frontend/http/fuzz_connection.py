"""A client's connection that tells how it ends: asyncio's streams take a cut for the end of TLS, and read ahead."""

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

T = TypeVar("T")
# Of either side's buffer in the kernel, which is megabytes otherwise: an answer would be gone before the client reads.
NARROW_BYTES = 4096


class FuzzConnection:
    """Reads only when asked to, so that what the client does not read stays with the server."""

    def __init__(self, pace: Callable[[], Awaitable[None]], *, is_narrow: bool) -> None:
        """Await `pace` each time before something is received."""
        self._pace = pace
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if is_narrow:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)
        self._received = bytearray()

    async def connect(self, port: int) -> None:
        await asyncio.get_running_loop().sock_connect(self._socket, ("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self, *, is_reset: bool = False) -> None:
        """Nothing may be sent or received any more, nor be waited for."""
        if is_reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def read_until(self, separator: bytes) -> bytes:
        while (place := self._received.find(separator)) < 0:
            await self._receive_more()
        return self._take(place + len(separator))

    async def read_exactly(self, num_bytes: int) -> bytes:
        while len(self._received) < num_bytes:
            await self._receive_more()
        return self._take(num_bytes)

    async def read_to_end(self) -> bytes:
        try:
            while True:
                await self._receive_more()
        except asyncio.IncompleteReadError as end:
            return end.partial

    async def wait_until_closed(self, *, ends_tls: bool) -> None:
        """After `read_to_end`: wait for the end of the connection under TLS, with or without ending it, too."""

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken

    async def _receive_more(self) -> None:
        await self._pace()
        piece = await self._receive()
        if not piece:
            raise asyncio.IncompleteReadError(self._take(len(self._received)), None)
        self._received += piece

    async def _receive(self) -> bytes:
        """Receive something; b"" is a regular end."""
        return await asyncio.get_running_loop().sock_recv(self._socket, 2**16)


class TlsFuzzConnection(FuzzConnection):
    """An end of the connection without TLS's own, `close_notify`, before it is an `ssl.SSLError`."""

    def __init__(self, pace: Callable[[], Awaitable[None]], *, is_narrow: bool) -> None:
        super().__init__(pace, is_narrow=is_narrow)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _make_context().wrap_bio(self._incoming, self._outgoing)
        # What is encrypted has to be sent in order.
        self._sending = asyncio.Lock()

    async def connect(self, port: int) -> None:
        await super().connect(port)
        await self._do(self._tls.do_handshake)

    async def send(self, data: bytes) -> None:
        async with self._sending:
            self._tls.write(data)
            await self._flush()

    async def end_sending(self) -> None:
        """Send `close_notify`."""
        async with self._sending:
            with suppress(ssl.SSLError):  # the server's is not there yet
                self._tls.unwrap()
            await self._flush()

    async def wait_until_closed(self, *, ends_tls: bool) -> None:
        with suppress(ConnectionError):
            if ends_tls:
                await self.end_sending()
            assert not await super()._receive(), "something follows the end of TLS"

    async def _receive(self) -> bytes:
        try:
            return await self._do(lambda: self._tls.read(2**16))
        except ssl.SSLZeroReturnError:  # rather than b"" if this side has ended TLS, too
            return b""

    async def _do(self, operation: Callable[[], T]) -> T:
        while True:
            try:
                return operation()
            except ssl.SSLWantReadError:
                await self._flush()  # the handshake
            if piece := await super()._receive():
                self._incoming.write(piece)
            else:
                self._incoming.write_eof()

    async def _flush(self) -> None:
        if outgoing := self._outgoing.read():
            await super().send(outgoing)


@cache
def _make_context() -> ssl.SSLContext:
    return ssl._create_unverified_context()
