"""The connections to a server behind the router, as httpcore uses them, on asyncio alone.

httpcore's own take twice the processor time, and with uvloop fail in odd ways if the server closes one of them just
then. This reads ahead, so that it is known at once when the server has closed it; but not far.
"""

import asyncio
import socket
import ssl
from collections.abc import Iterable

import httpcore

# A machine that vanished is noticed after 25 seconds: a connection that waits for an answer would wait for ever.
NOTICE_LOSS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class ReplicaBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection(host, port, ssl=self._tls)
            if (connection := writer.get_extra_info("socket")) is None:
                raise ConnectionResetError("it closes connections at once")
            for option in NOTICE_LOSS:
                connection.setsockopt(*option)
        except (OSError, UnicodeError) as error:  # the latter of names that no host can have
            raise httpcore.ConnectError(str(error) or repr(error)) from error
        return ReplicaStream(reader, writer)


class ReplicaStream(httpcore.AsyncNetworkStream):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore.ReadError(str(error) or repr(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._writer.transport.is_closing():
            raise httpcore.WriteError("the connection is closed")  # uvloop's own error is no OSError
        try:
            self._writer.write(buffer)
            async with asyncio.timeout(timeout):
                await self._writer.drain()
        except OSError as error:
            raise httpcore.WriteError(str(error) or repr(error)) from error

    async def aclose(self) -> None:
        """Close it at once, whatever is still to be sent."""
        self._writer.transport.abort()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return self  # it began with TLS

    def get_extra_info(self, info: str) -> object:
        return (self._reader.at_eof() or self._writer.transport.is_closing()) if info == "is_readable" else None
