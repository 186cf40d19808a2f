"""One HTTP/1.1 request on a connection of its own, with the body of its response as it arrives from the socket.

Plain asyncio: the code between the socket and the clock should cost only microseconds. Independent of the content.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache

from keepsight import lost_machines
from keepsight.bench.address import Address
from keepsight.errors import NoAnswerError

_PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    _reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises EOFError if the connection ends before it is complete."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := await self._read_chunk_size():
                yield (await self._reader.readexactly(size + 2))[:-2]
        elif length := self.headers.get("content-length"):
            yield await self._reader.readexactly(int(length))
        else:
            while piece := await self._reader.read(_PIECE_BYTES):
                yield piece

    async def _read_chunk_size(self) -> int:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return int(line.partition(b";")[0], 16)

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


@dataclass(frozen=True, slots=True)
class Connection:
    address: Address
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        return await self._ask("POST", path, body, {"Content-Type": "application/json", **headers})

    async def get(self, path: str, headers: Mapping[str, str]) -> Response:
        return await self._ask("GET", path, b"", headers)

    async def _ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """Send a request. Returns as soon as the response's head has arrived."""
        self._writer.write(self._head(method, path, len(body), headers) + body)
        await self._writer.drain()
        version, _, rest = (await self._reader.readline()).decode("latin-1").partition(" ")
        if not version.startswith("HTTP/1"):
            raise NoAnswerError(f"{self.address.authority} ended the connection")
        return Response(int(rest[:3]), await self._read_headers(), self._reader)

    def _head(self, method: str, path: str, num_bytes: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {self.address.path}{path} HTTP/1.1", f"Host: {self.address.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {num_bytes}", "Connection: close"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _read_headers(self) -> dict[str, str]:
        headers = {}
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return headers


@asynccontextmanager
async def connecting(address: Address) -> AsyncIterator[Connection]:
    context = _certificates() if address.is_secure else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    try:
        if (own := writer.get_extra_info("socket")) is None:
            raise ConnectionResetError("it closes connections at once")
        for option in lost_machines.PROBES:
            own.setsockopt(*option)
        yield Connection(address, reader, writer)
    finally:
        writer.close()


@cache
def _certificates() -> ssl.SSLContext:
    """Read once those that are trusted: it takes longer than a connection, and no other goes on meanwhile."""
    return ssl.create_default_context()
