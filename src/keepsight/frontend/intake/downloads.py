"""Downloads for all requests, on one event loop in a thread of its own, which starts with the first URL.

Callers in any thread or event loop get a future; canceling it stops downloads that no other caller waits for.
"""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from keepsight.errors import MediaTimeoutError
from keepsight.frontend.intake.fetch_url import Fetched, UrlFetcher
from keepsight.frontend.intake.http_caching import Validators
from keepsight.frontend.intake.media_limits import MediaLimits, RequestBytes
from keepsight.frontend.intake.url_cache import UrlCache
from keepsight.frontend.intake.web_url import UrlFault
from keepsight.frontend.prompt.read_messages import PicturePart
from keepsight.made_once import made_once

# Per request: limits the load that a client can direct at other servers, and the bytes held before they are counted.
MAX_DOWNLOADS_AT_ONCE = 8
# Host lookups run in threads and cannot be canceled: slow ones must not block the others.
MAX_LOOKUPS_AT_ONCE = 128
T = TypeVar("T")


class Downloads:
    def __init__(self, open_fetcher: Callable[[], UrlFetcher], limits: MediaLimits, max_cache_bytes: int) -> None:
        """`open_fetcher` is called when the first URL is fetched."""
        self._open_fetcher, self._limits = open_fetcher, limits
        self._thread = _LoopThread()
        self.cache = UrlCache(self._fetch, max_cache_bytes, time.monotonic)

    def start(self, parts: Mapping[str, PicturePart], cache_salt: str | None) -> "Future[dict[str, bytes]]":
        """Download the keys of `parts`; each value is the part that its URL is for.

        The future gives the bytes by URL, or the PictureError of the first download that fails.
        """
        return self._thread.submit(self._fetch_in_time(parts, cache_salt))

    def close(self) -> None:
        """Cancel all running downloads and end the thread."""
        self._thread.close()

    async def _fetch_in_time(self, parts: Mapping[str, PicturePart], cache_salt: str | None) -> dict[str, bytes]:
        request = _RequestDownloads(self.cache, cache_salt, self._limits.count_bytes())
        try:
            async with asyncio.timeout(self._limits.fetch_seconds):
                return await request.fetch_all(parts)
        except TimeoutError as error:
            late = next((part.field for url, part in parts.items() if url not in request.contents), None)
            if late is None:  # all arrived at the last moment
                return request.contents
            message = f"was not downloaded within the {self._limits.fetch_seconds:g} seconds that a request has"
            raise MediaTimeoutError(late, message) from error

    @made_once
    def _fetcher(self) -> UrlFetcher:
        return self._open_fetcher()

    async def _fetch(self, url: str, known: Validators | None) -> Fetched:
        return await self._fetcher.fetch(url, known)


class _RequestDownloads:
    """The downloads of one request: several at once, their bytes counted as they arrive."""

    def __init__(self, cache: UrlCache, cache_salt: str | None, budget: RequestBytes) -> None:
        self._cache, self._cache_salt, self._budget = cache, cache_salt, budget
        self._gate = asyncio.Semaphore(MAX_DOWNLOADS_AT_ONCE)
        self.contents: dict[str, bytes] = {}

    async def fetch_all(self, parts: Mapping[str, PicturePart]) -> dict[str, bytes]:
        tasks = [asyncio.create_task(self._fetch_one(url, part)) for url, part in parts.items()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return self.contents

    async def _fetch_one(self, url: str, part: PicturePart) -> None:
        async with self._gate:
            try:
                content = await self._cache.get(url, self._cache_salt, part.modality)
            except UrlFault as fault:
                raise fault.under(part.field) from fault
        self._budget.add(len(content), part.field)
        self.contents[url] = content


class _LoopThread:
    """An event loop in a thread, started by the first coroutine and stopped by `close` or garbage collection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError("closed: nothing is downloaded any more")
            if self._loop is None:
                self._loop = self._begin()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel all that runs in the thread, and wait until it has ended; does neither if it never started."""
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
            self._stop()

    def _begin(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(ThreadPoolExecutor(MAX_LOOKUPS_AT_ONCE, thread_name_prefix="lookup"))
        thread = threading.Thread(target=_run, args=(loop,), name="downloads", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, loop, thread)
        # At interpreter exit the newest finalizers run first, so `close` may be called after this one would have run.
        self._stop.atexit = False
        return loop


async def _cancel_others() -> None:
    running = asyncio.all_tasks() - {asyncio.current_task()}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    # The last reference may be dropped in this very thread, which cannot join itself.
    if thread is not threading.current_thread():
        thread.join()
