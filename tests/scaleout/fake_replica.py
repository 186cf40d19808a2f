"""A replica that answers as a test says, and fails as real ones do: its connections are reset, or nobody listens."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from keepsight.api_settings import ApiSettings
from keepsight.scaleout.replicas import Replicas
from keepsight.scaleout.router_server import make_router
from tests.server_in_thread import running_in_thread

PATIENCE = 30  # seconds


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def length(self) -> int:
        (length,) = self.header("content-length") or ["0"]
        return int(length)


# Writes an answer. The connection is closed after it if it returns True.
Script = Callable[["FakeReplica", Asked, asyncio.StreamWriter], Awaitable[bool | None]]


def respond(body: object, status: int = 200, *headers: str, is_json: bool = True) -> bytes:
    content = json.dumps(body).encode() if is_json else str(body).encode()
    kind = "application/json" if is_json else "text/html"
    lines = [f"HTTP/1.1 {status} As It Is", f"Content-Type: {kind}", f"Content-Length: {len(content)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def say_who(replica: "FakeReplica", asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(respond({"replica": replica.port}))


class FakeReplica:
    def __init__(self, loop: asyncio.AbstractEventLoop, script: Script) -> None:
        self.script, self.asked = script, list[Asked]()
        self.state: dict[str, Any] = {"status": "ok"}
        # What it says instead when it is asked for its state.
        self.odd_state: bytes | None = None
        self.num_connections = 0
        # Whether it says nothing any more when it is asked for its state.
        self.is_stopped = False
        # Whether it resets the connection in the middle of a request's body.
        self.breaks_uploads = False
        # Set by a test to let a script go on, and by a script to tell a test.
        self.go, self.told = asyncio.Event(), threading.Event()
        self.port = 0
        self._loop, self._readers = loop, dict[asyncio.StreamWriter, asyncio.StreamReader]()
        self.listen()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return len(self._readers)

    def listen(self) -> None:
        async def listen() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

        self.run(listen())

    def die(self) -> None:
        self.run(self.end())

    async def end(self) -> None:
        """Reset all connections, and listen no more."""
        self._server.close()
        for writer in [*self._readers]:
            reset(writer)

    async def wait_until_left(self, writer: asyncio.StreamWriter) -> None:
        """Wait until the other side has closed a connection."""
        with suppress(ConnectionError):
            await self._readers[writer].read()

    def let_go(self) -> None:
        self._loop.call_soon_threadsafe(self.go.set)

    def run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._readers[writer] = reader
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                asked = await _read_head(reader)
                if self.breaks_uploads and asked.length:
                    await reader.readexactly(asked.length // 2)
                    reset(writer)
                    break
                asked = replace(asked, body=await reader.readexactly(asked.length))
                if asked.target == "/ready" and self.is_stopped:
                    await reader.read()
                    break
                if asked.target == "/ready" and self.odd_state is not None:
                    writer.write(self.odd_state)
                    continue
                if asked.target == "/ready":
                    writer.write(respond(self.state, 200 if self.state["status"] == "ok" else 503))
                    continue
                self.asked.append(asked)
                if await self.script(self, asked, writer):
                    break
                await writer.drain()
        del self._readers[writer]
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_head(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    return Asked(method, target, headers, b"")


@contextmanager
def fakes(*scripts: Script) -> Iterator[list[FakeReplica]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    replicas: list[FakeReplica] = []
    try:
        replicas += [FakeReplica(loop, script) for script in scripts]
        yield replicas
    finally:
        for replica in replicas:
            replica.die()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


def routing(*addresses: str, shutdown_seconds: float = 30.0, **settings: Any) -> AbstractContextManager[int]:
    """Run a router, on the port that is returned on entering."""

    def start(replicas: Replicas) -> None:
        for address in addresses:
            replicas.add(address)

    return running_in_thread(make_router(start, ApiSettings(**settings), shutdown_seconds), PATIENCE)


@contextmanager
def routed(*scripts: Script, **settings: Any) -> Iterator[tuple[str, list[FakeReplica]]]:
    """Run replicas and a router before them; yield its URL, and them."""
    with fakes(*scripts) as replicas, routing(*(each.address for each in replicas), **settings) as port:
        yield f"http://127.0.0.1:{port}", replicas
