"""The network's side of all requests: one event loop on a thread of its own, begun with the first URL.

Callers of any thread or loop get a future; cancelling it ends what nobody else waits for.
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

# Of one request: what a caller can make this server do to others, and hold in memory before its bytes are summed.
MAX_DOWNLOADS_AT_ONCE = 8
# A host is looked up by a thread, which cannot be called back: slow ones must not stop the others.
MAX_LOOKUPS_AT_ONCE = 128
T = TypeVar("T")


class Downloads:
    def __init__(self, open_fetcher: Callable[[], UrlFetcher], limits: MediaLimits, max_cache_bytes: int) -> None:
        """The fetcher is opened when it is first needed."""
        self._open_fetcher, self._limits = open_fetcher, limits
        self._thread = _LoopThread()
        self.cache = UrlCache(self._fetch, max_cache_bytes, time.monotonic)

    def start(self, parts: Mapping[str, PicturePart], cache_salt: str | None) -> "Future[dict[str, bytes]]":
        """`parts`: what each URL is to be.  Gives their bytes, or the PictureError of the first that fails."""
        return self._thread.submit(self._fetch_in_time(parts, cache_salt))

    def close(self) -> None:
        """What is being downloaded is cancelled."""
        self._thread.close(self._end)

    async def _fetch_in_time(self, parts: Mapping[str, PicturePart], cache_salt: str | None) -> dict[str, bytes]:
        request = _RequestDownloads(self.cache, cache_salt, self._limits.count_bytes())
        try:
            async with asyncio.timeout(self._limits.fetch_seconds):
                return await request.fetch_all(parts)
        except TimeoutError as error:
            late = next((part.field for url, part in parts.items() if url not in request.contents), None)
            if late is None:  # all came, at the last moment
                return request.contents
            message = f"was not downloaded within the {self._limits.fetch_seconds:g} seconds that a request has"
            raise MediaTimeoutError(late, message) from error

    @made_once
    def _fetcher(self) -> UrlFetcher:
        return self._open_fetcher()

    async def _fetch(self, url: str, known: Validators | None) -> Fetched:
        return await self._fetcher.fetch(url, known)

    async def _end(self) -> None:
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._fetcher.close()


class _RequestDownloads:
    """One request's, several at once, summed as they come."""

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
    """Begun with the first coroutine, ended by `close` or when nobody knows it any more."""

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

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Returns when the thread has ended; `last` is done in it, if it ever began."""
        with self._lock:
            self._is_closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(last(), loop).result()
            self._stop()

    def _begin(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(ThreadPoolExecutor(MAX_LOOKUPS_AT_ONCE, thread_name_prefix="lookup"))
        thread = threading.Thread(target=_run, args=(loop,), name="downloads", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, loop, thread)
        # When the interpreter ends, `close` may still be to come: what was made last is finalized first.
        self._stop.atexit = False
        return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    # Whoever forgets it may do so in its own thread.
    if thread is not threading.current_thread():
        thread.join()
