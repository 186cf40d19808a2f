"""A web server for tests, on real sockets in this process, whose answers are given as raw bytes."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Asked:
    path: str
    headers: dict[str, str]  # names in lower case
    has_left: Callable[[], bool]  # returns whether the client has left


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]
LOCAL = ["127.0.0.0/8"]


def response(content: bytes = b"", status: int = 200, **headers: str) -> bytes:
    """Return an HTTP response; underscores in header names become hyphens."""
    named = {"Content-Length": str(len(content)), **{name.replace("_", "-"): text for name, text in headers.items()}}
    lines = [f"HTTP/1.1 {status} Words", *(f"{name}: {text}" for name, text in named.items() if text), "", ""]
    return "\r\n".join(lines).encode("latin-1") + content


def answering(*answers: bytes) -> Answer:
    """Give these answers one after another, and repeat the last one forever."""
    left = list(answers)

    async def answer(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0) if len(left) > 1 else left[0])

    return answer


@dataclass
class PictureServer:
    port: int = 0
    host: str = "127.0.0.1"
    scheme: str = "http"
    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def url(self, path: str, host: str | None = None) -> str:
        return f"{self.scheme}://{host or self.host}:{self.port}{path}"

    def serve(self, path: str, *answers: bytes | Answer) -> str:
        written = [each for each in answers if isinstance(each, bytes)]
        scripted = [each for each in answers if not isinstance(each, bytes)]
        self.answers[path] = scripted[0] if scripted else answering(*written)
        return self.url(path)

    def num_asked(self, path: str) -> int:
        return sum(asked.path == path for asked in self.asked)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async for asked in _requests(reader):
                self.asked.append(asked)
                path = asked.path.partition("?")[0]
                await self.answers.get(path, answering(response(status=404)))(asked, writer)
                await writer.drain()
        except (OSError, asyncio.CancelledError):  # the client left, or the test ends
            pass
        finally:
            writer.close()


@contextmanager
def picture_server(
    tls: ssl.SSLContext | None = None, host: str = "127.0.0.1", port: int = 0
) -> Iterator[PictureServer]:
    server, loop = PictureServer(host=host, scheme="http" if tls is None else "https"), asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(server.handle, host, port, ssl=tls))
    server.port = listener.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_end(listener), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(listener: asyncio.Server) -> None:
    listener.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _requests(reader: asyncio.StreamReader) -> AsyncIterator[Asked]:
    while head := await _read_head(reader):
        line, *lines = head.decode("latin-1").split("\r\n")
        named = (each.partition(":") for each in lines if each)
        yield Asked(line.split(" ")[1], {name.lower(): text.strip() for name, _, text in named}, reader.at_eof)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
