"""A download may be canceled at any step, by its client or by a timeout, without affecting the next one."""

import asyncio
import ssl
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any

import pytest

from keepsight.frontend.intake import connections
from keepsight.frontend.intake.fetch_url import UrlFetcher
from tests.frontend.intake.test_fetch_url import LONG, MAX_BYTES, guard_of, redirect_to, tls_server, trusting
from tests.frontend.picture_server import PictureServer, picture_server, response

__all__ = ["tls_server"]  # a fixture


@pytest.fixture
def plain_server() -> Iterator[PictureServer]:
    with picture_server() as server:
        yield server


@types.coroutine
def stepping(work: Coroutine[Any, Any, object], on_step: Callable[[int], object]) -> Generator[Any, Any, object]:
    """Run the work; call `on_step` each time it awaits, with the number of awaits so far."""
    num_steps, resume = 0, partial(work.send, None)
    while True:
        try:
            awaited = resume()
        except StopIteration as end:
            return end.value
        num_steps += 1
        on_step(num_steps)
        try:
            resume = partial(work.send, (yield awaited))
        except BaseException as error:
            resume = partial(work.throw, error)


async def _await(work: Awaitable[object]) -> object:
    return await work


async def is_cancelled_at(step: int, work: Coroutine[Any, Any, object], num_times: int) -> bool:
    """Cancel the work at the given step. Return False if it ended before that."""
    event_loop = asyncio.get_running_loop()

    def cancel(num_steps: int) -> None:
        if step <= num_steps < step + num_times:
            event_loop.call_soon(running.cancel)

    running = event_loop.create_task(_await(stepping(work, cancel)))
    await asyncio.wait([running])
    return running.cancelled()


@pytest.mark.parametrize("num_times", [1, 2])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_download_canceled_at_any_step_frees_its_connection_slot(
    scheme: str,
    num_times: int,
    plain_server: PictureServer,
    tls_server: PictureServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    server = plain_server if scheme == "http" else tls_server
    server.serve("/b", response(b"picture"))
    server.serve("/a", redirect_to("/b"))
    url = server.url("/a", "pictures.test")

    async def run() -> int:
        fetcher = UrlFetcher(guard_of("127.0.0.1"), MAX_BYTES, LONG, trusting())
        step = 1
        while await is_cancelled_at(step, fetcher.fetch(url), num_times):
            assert (await fetcher.fetch(url)).content == b"picture"
            step += 1
        return step

    assert asyncio.run(run()) > 10


def test_canceling_one_download_does_not_disturb_others(plain_server: PictureServer) -> None:
    may_end = asyncio.Event()

    async def answer(_asked: object, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"picture")[:-1])
        while not may_end.is_set():
            await asyncio.sleep(0.005)
        writer.write(b"e")

    url = plain_server.serve("/a", answer)

    async def run() -> None:
        fetcher = UrlFetcher(guard_of(), MAX_BYTES, LONG, ssl.create_default_context())
        staying, leaving = (asyncio.create_task(fetcher.fetch(url)) for _ in range(2))
        while fetcher._num_in_flight_bytes < 2 * len("pictur"):
            await asyncio.sleep(0.005)
        leaving.cancel()
        await asyncio.wait([leaving])
        may_end.set()
        assert (await staying).content == b"picture"
        assert (await fetcher.fetch(url)).content == b"picture"

    asyncio.run(run())
