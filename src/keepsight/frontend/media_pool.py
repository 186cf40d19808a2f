"""Threads that make pixels, each media hash once for all who wait for it; and the cache of what they made.

Knows neither engine nor event loop: callers hand in what is to be called.  Without a cache it holds no pixels once they
are delivered.  Invariant: a hash has waiters (perhaps none any more) exactly while it is queued or being made, what is
queued has at least one, and what is held has none.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from keepsight.frontend.lru_cache import LruCache
from keepsight.frontend.prepare_request import PreparedRequest
from keepsight.requests import Pixels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiter:
    prepared: PreparedRequest
    deliver: Callable[[str, Pixels], None]
    fail: Callable[[Exception], None]


@dataclass(slots=True)
class _Job:
    """One picture; the request that asked first lends its bytes, whoever is still waiting."""

    prepared: PreparedRequest
    media_hashes: Collection[str]


class MediaPool:
    def __init__(self, num_workers: int, max_cache_bytes: int = 0) -> None:
        """Of pixels that are kept for later requests; 0: none are."""
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="media")
        self._lock = threading.Lock()
        self._queue: deque[_Job] = deque()
        # By media hash, then by request.
        self._waiters: dict[str, dict[str, _Waiter]] = {}
        self._cache = LruCache[str, Pixels](max_cache_bytes, _size_of) if max_cache_bytes else None
        # Work really done.
        self.num_decoded = self.num_preprocessed = 0

    def make(
        self,
        prepared: PreparedRequest,
        media_hashes: Collection[str],
        deliver: Callable[[str, Pixels], None],
        fail: Callable[[Exception], None],
        *,
        inline: bool = False,
    ) -> None:
        """Calls `deliver` once for each hash; or `fail`, once, and gives up the others.

        What is held is delivered before this returns, all else from a thread of the pool's own.
        """
        request_id = prepared.engine_request.request_id
        waiter = _Waiter(prepared, deliver, fail)
        with self._lock:
            held = self._find_held(prepared, media_hashes)
            missing = [media_hash for media_hash in media_hashes if media_hash not in held]
            new = [media_hash for media_hash in missing if media_hash not in self._waiters]
            for media_hash in missing:
                self._waiters.setdefault(media_hash, {})[request_id] = waiter
            jobs = [_Job(prepared, group) for group in prepared.group_by_picture(new)]
            self._queue += jobs
        for _ in jobs:
            # Not the job itself: one that is cancelled must not lie in the executor, with all its bytes.
            self._threads.submit(self._run_next)
        for media_hash, pixels in held.items():
            _call(deliver, media_hash, pixels)

    def forget(self, request_id: str) -> None:
        """What nobody else waits for and has not begun will not be made."""
        with self._lock:
            self._drop_waiter(request_id)

    def reset_cache(self) -> None:
        """What is in the making is kept all the same once it is made."""
        with self._lock:
            if self._cache is not None:
                self._cache.clear()

    def close(self) -> None:
        """Nothing more is delivered or held; returns when what had begun has ended."""
        with self._lock:
            self._queue.clear()
            self._waiters.clear()
        self._threads.shutdown()
        self.reset_cache()

    def check_invariants(self) -> None:
        with self._lock:
            for job in self._queue:
                assert job.media_hashes
                assert all(self._waiters[media_hash] for media_hash in job.media_hashes)
            if self._cache is not None:
                self._cache.check_invariants()
                assert not any(map(self._cache.is_cached, self._waiters))

    def _find_held(self, prepared: PreparedRequest, media_hashes: Collection[str]) -> dict[str, Pixels]:
        if self._cache is None:
            return {}
        # All of the request's, or what is made of it first would evict what it asks for next.
        for item in prepared.engine_request.media:
            self._cache.touch(item.media_hash)
        found = {media_hash: self._cache.get_and_update(media_hash) for media_hash in dict.fromkeys(media_hashes)}
        return {media_hash: pixels for media_hash, pixels in found.items() if pixels is not None}

    def _drop_waiter(self, request_id: str) -> None:
        for waiters in self._waiters.values():
            waiters.pop(request_id, None)
        for job in self._queue:
            unwanted = [media_hash for media_hash in job.media_hashes if not self._waiters[media_hash]]
            job.media_hashes = [media_hash for media_hash in job.media_hashes if media_hash not in unwanted]
            for media_hash in unwanted:
                del self._waiters[media_hash]
        self._queue = deque(job for job in self._queue if job.media_hashes)

    def _run_next(self) -> None:
        with self._lock:
            if not self._queue:
                return
            job = self._queue.popleft()
        try:
            made = job.prepared.pixels_of(job.media_hashes)
        except Exception as error:
            self._fail(job, error)
        else:
            self._deliver(made)

    def _fail(self, job: _Job, error: Exception) -> None:
        failed: dict[str, tuple[str, _Waiter]] = {}
        with self._lock:
            for media_hash in job.media_hashes:
                for request_id, waiter in self._waiters.pop(media_hash, {}).items():
                    failed.setdefault(request_id, (media_hash, waiter))
            for request_id in failed:
                self._drop_waiter(request_id)
        for media_hash, waiter in failed.values():
            _call(waiter.fail, waiter.prepared.as_own(error, media_hash))

    def _deliver(self, made: dict[str, Pixels]) -> None:
        """Held from the moment that nobody waits any more, so that nobody can come between and begin it anew."""
        if self._cache is not None:
            made = {media_hash: _as_kept(pixels) for media_hash, pixels in made.items()}
        with self._lock:
            if self._cache is not None:
                for media_hash, pixels in made.items():
                    self._cache.put_if_fits(media_hash, pixels)
            self.num_decoded += 1
            self.num_preprocessed += len(made)
            waiters = {media_hash: self._waiters.pop(media_hash, {}) for media_hash in made}
        for media_hash, pixels in made.items():
            for waiter in waiters[media_hash].values():
                _call(waiter.deliver, media_hash, pixels)


def _as_kept(pixels: Pixels) -> Pixels:
    """Never to change; and its own memory, as a view would hold all that it was cut from, uncounted."""
    owned = pixels if pixels.base is None else pixels.copy()
    owned.flags.writeable = False
    return owned


def _size_of(pixels: Pixels) -> int:
    assert pixels.base is None, "a view"
    return pixels.nbytes


def _call(callback: Callable[..., None], *arguments: object) -> None:
    """One who cannot be told must not keep the others from being told."""
    try:
        callback(*arguments)
    except Exception:
        logger.exception("pixels, or their failure, could not be delivered")
