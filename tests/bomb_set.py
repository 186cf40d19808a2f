"""Attack a real server with hostile pictures and requests:  python -m tests.bomb_set [--only WORD]

Starts the server with its defaults, except that one address of this machine counts as the internet. For each case,
prints the answers, how much the memory of all server processes grew, and how long a concurrent client waited for one
token. Fails if an answer is not an expected one, if memory grew too much, or if the concurrent client failed.
"""

import argparse
import asyncio
import itertools
import json
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from tests.drawn import draw, to_data_url, to_png
from tests.frontend.picture_server import Answer, Asked, PictureServer, picture_server, response
from tests.frontend.sample_pictures import encode, random_picture
from tests.real_server import RealServer, real_server
from tests.test_media_intake import BOMBS, endless_gif, packed_zeros, png_of

INTERNET, INSIDE = "127.0.0.2", "127.0.0.1"
REBOUND_HOST = "rebound.example"
MIB = 2**20
GROWTH_MIB = 300
# A picture of the maximum size is 256 MiB of pixels, plus some copies; two are decoded at once.
DECODING_MIB = 1600
LONGEST_ANSWER_SECONDS = 120
# DNS rebinding: every second lookup of the host gives an internal address.
RESOLVER = f"""
import socket
resolve, lookups = socket.getaddrinfo, []
def getaddrinfo(host, *args, **options):
    if host in ({REBOUND_HOST!r}, {REBOUND_HOST.encode()!r}):
        lookups.append(host)
        host = {INTERNET!r} if len(lookups) % 2 else {INSIDE!r}
    return resolve(host, *args, **options)
socket.getaddrinfo = getaddrinfo
"""


@dataclass(frozen=True)
class Case:
    name: str
    body: Callable[[], bytes]
    # Every answer must be one of these (status, code) pairs.
    expected: tuple[tuple[int, str | None], ...]
    growth_mib: int = GROWTH_MIB
    # The number of concurrent requests.
    count: int = 1


@dataclass
class Outcome:
    answers: list[tuple[int, str | None]]
    seconds: float
    growth_mib: float
    bystander: list[float] = field(default_factory=list)


# Requests -------------------------------------------------------------------------------------------------------


def chat(*urls: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


def at_the_limit(seed: int = 0) -> bytes:
    """Return a PNG of 64 million pixels in less than a megabyte, different for each seed."""
    rows = b"\0" + struct.pack(">I", seed) + bytes(8000 * (1 + 3 * 8000) - 5)
    return png_of(8000, 8000, (b"IDAT", zlib.compress(rows, 1)))


def cases(origin: PictureServer) -> Iterator[Case]:
    whole = random_picture("RGB", (500, 400), 1)
    codes = {name: ((error.status, error.code),) for name, (_, error) in BOMBS.items()}
    for name, (make, _) in BOMBS.items():
        yield Case(name, partial(chat, to_data_url(make())), codes[name])
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF"):
        bytes_of_it = encode(whole, kind)
        cut = to_data_url(bytes_of_it[: len(bytes_of_it) // 2])
        yield Case(f"half a {kind}", partial(chat, cut), codes["truncated"])
    more = png_of(16, 16, (b"IDAT", packed_zeros()))
    yield Case("more packed than the header says", lambda: chat(to_data_url(more)), ((200, None), *codes["truncated"]))
    yield Case("as large as may be", lambda: chat(to_data_url(at_the_limit())), ((200, None),), DECODING_MIB)
    yield Case(
        "eight of these",
        lambda: chat(to_data_url(at_the_limit(time.monotonic_ns() % 2**32))),
        ((200, None),),
        DECODING_MIB,
        8,
    )
    yield from bodies()
    yield from downloads(origin)


def bodies() -> Iterator[Case]:
    too_large, bad = ((413, "media_too_large"),), ((400, "invalid_argument"),)
    yield Case("100 MB body, one picture", lambda: chat("data:image/png;base64," + "A" * 99_000_000), too_large, 700)
    yield Case("101 MiB body", lambda: b" " * (101 * MIB), ((413, None), (413, "body_too_large")))
    yield Case("eight of these", lambda: b" " * (101 * MIB), ((413, None), (413, "body_too_large")), count=8)
    yield Case("a million brackets", lambda: b"[" * 1_000_000, bad)
    yield Case("33 million lists", lambda: b'{"messages":[' + b"[]," * 33_000_000 + b"1]}", bad)
    small = to_data_url(to_png(draw(1).picture.resize((8, 8))))
    yield Case("a thousand pictures", lambda: chat(*[small] * 1000), ((400, "too_many_pictures"),))


def downloads(origin: PictureServer) -> Iterator[Case]:
    # URLs must differ: the same URL would be downloaded only once.
    numbers = itertools.count()
    large, late, refused = ((413, "media_too_large"),), ((400, "media_timeout"),), ((400, "media_refused"),)

    def at(path: str) -> Callable[[], bytes]:
        return lambda: chat(origin.url(f"{path}?{next(numbers)}"))

    origin.serve("/announced", response(b"", Content_Length=str(100 * MIB)))
    yield Case("100 MiB, announced", at("/announced"), large)
    origin.serve("/endless", _endless(b"\0" * MIB))
    yield Case("bytes without end", at("/endless"), large)
    yield Case("sixteen of these", at("/endless"), (*large, *late, (429, "media_busy")), 1500, 16)
    gif = endless_gif()[:-1]
    origin.serve("/gif", _endless(gif[len(gif) // 2 :] * 20, UNTIL_CLOSED + gif))
    yield Case("a GIF without end", at("/gif"), large)
    origin.serve("/slow", _endless(b"a", pause=0.5))
    yield Case("a server that drips", at("/slow"), late)
    yield Case("thirty-two of these", at("/slow"), late, count=32)
    origin.serve("/silent", _silence)
    yield Case("a server that says nothing", at("/silent"), late)
    dear = (*late, (400, "media_not_fetched"))
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    origin.serve("/pieces", _endless(b"1\r\na\r\n" * 10_000, chunked))
    yield Case("eight bodies in tiny pieces", at("/pieces"), dear, count=8)
    origin.serve("/hints", _endless(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000, b""))
    yield Case("eight answers after endless hints", at("/hints"), dear, count=8)
    origin.serve("/packed", response(b"\x1f\x8b", Content_Encoding="gzip"))
    yield Case("a packed answer", at("/packed"), ((400, "media_not_fetched"),))
    inner = (
        "http://169.254.169.254/latest/meta-data",
        f"http://{INSIDE}:{origin.port}/",
        f"http://[::1]:{origin.port}/",
    )
    for number, place in enumerate((*inner, "http://0x7f000001/", "file:///etc/passwd")):
        origin.serve(f"/to/{number}", response(b"", 302, Location=place))
        yield Case(
            f"redirect to {place[:30]}",
            at(f"/to/{number}"),
            (*refused, (400, "media_not_fetched"), (400, "unsupported_field")),
        )
    origin.serve("/round", response(b"", 302, Location="/round"))
    yield Case("redirect to itself", at("/round"), ((400, "media_not_fetched"),))
    again = f"http://{REBOUND_HOST}:{origin.port}/again"
    origin.serve("/again", response(b"", 302, Location=again, Connection="close"))
    yield Case("a name that moves inside", lambda: chat(again), refused)


UNTIL_CLOSED = response(Content_Length="", Connection="close")


def _endless(piece: bytes, head: bytes = UNTIL_CLOSED, pause: float = 0.0) -> Answer:
    async def answer(request: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not request.has_left():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)

    return answer


async def _silence(request: Asked, _writer: asyncio.StreamWriter) -> None:
    while not request.has_left():
        await asyncio.sleep(0.1)


# Measurements ---------------------------------------------------------------------------------------------------


class Watch:
    """During a case, measures the server's peak memory and repeatedly requests one token as a bystander."""

    def __init__(self, server: RealServer) -> None:
        self._server, self._ends = server, threading.Event()
        self.peak_bytes = 0
        self.bystander: list[float] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ThreadPoolExecutor(2) as threads:
            work = [threads.submit(self._weigh), threads.submit(self._stand_by)]
            try:
                yield
            finally:
                self._ends.set()
            for each in work:
                each.result()

    def _weigh(self) -> None:
        while not self._ends.wait(0.02):
            self.peak_bytes = max(self.peak_bytes, self._server.memory_bytes())

    def _stand_by(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=LONGEST_ANSWER_SECONDS) as client:
            while not self._ends.wait(0.05) or not self.bystander:
                began = time.monotonic()
                body = {"prompt": f"{began}", "max_tokens": 1}
                client.post("/v1/completions", json=body).raise_for_status()
                self.bystander.append(time.monotonic() - began)


def try_out(case: Case, server: RealServer) -> Outcome:
    bodies = [case.body() for _ in range(case.count)]
    before, watch, began = server.memory_bytes(), Watch(server), time.monotonic()
    with watch.watching(), ThreadPoolExecutor(case.count) as threads:
        answers = list(threads.map(lambda body: ask(server, body), bodies))
        seconds = time.monotonic() - began
    return Outcome(answers, seconds, max(0, watch.peak_bytes - before) / MIB, watch.bystander)


def ask(server: RealServer, body: bytes) -> tuple[int, str | None]:
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, timeout=LONGEST_ANSWER_SECONDS)
    return answer.status_code, (answer.json().get("error") or {}).get("code")


def report(case: Case, outcome: Outcome) -> bool:
    is_right = set(outcome.answers) <= set(case.expected) and outcome.growth_mib <= case.growth_mib
    waits = sorted(outcome.bystander)
    answers = ", ".join(f"{status} {code or ''}".strip() for status, code in sorted(set(outcome.answers), key=str))
    bystander = f"{waits[len(waits) // 2] * 1000:.0f} / {waits[-1] * 1000:.0f}"
    print(
        f"| {case.name} | {answers} | {outcome.seconds:.1f} | {outcome.growth_mib:.0f} | {bystander} |"
        f"{'' if is_right else f' WRONG: {case.expected}, {case.growth_mib} MiB'}",
        flush=True,
    )
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    only = parser.parse_args().only
    with tempfile.TemporaryDirectory() as folder, picture_server(host=INTERNET) as origin:
        (Path(folder) / "sitecustomize.py").write_text(RESOLVER)
        options = ("--allowed-media-networks", f"{INTERNET}/32")
        with (
            picture_server(host=INSIDE, port=origin.port) as inside,
            real_server(*options, environment={"PYTHONPATH": folder}) as server,
        ):
            ask(server, chat(to_data_url(to_png(draw(1).picture))))
            print(
                "| case | answers | seconds | peak growth MiB | bystander ms, median / worst |\n|---|---|---|---|---|"
            )
            are_right = [report(case, try_out(case, server)) for case in cases(origin) if only in case.name]
            is_clean = "Traceback" not in server.log.read_text()
            print(f"requests that reached the inside: {len(inside.asked)}; tracebacks in the log: {not is_clean}")
            return int(not (all(are_right) and is_clean and not inside.asked))


if __name__ == "__main__":
    sys.exit(main())
