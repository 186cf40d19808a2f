"""Threads that make pixels, each media hash once for all who wait for it.

Knows neither engine nor event loop: callers hand in what is to be called.  Holds no pixels once they are delivered.
Invariant: a hash has waiters (perhaps none any more) exactly while it is queued or being made, and what is queued has
at least one.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

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
    def __init__(self, num_workers: int) -> None:
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="media")
        self._lock = threading.Lock()
        self._queue: deque[_Job] = deque()
        # By media hash, then by request.
        self._waiters: dict[str, dict[str, _Waiter]] = {}

    def make(
        self,
        prepared: PreparedRequest,
        media_hashes: Collection[str],
        deliver: Callable[[str, Pixels], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Calls, from a thread of its own, `deliver` once for each hash; or `fail`, once, and gives up the others."""
        request_id = prepared.engine_request.request_id
        waiter = _Waiter(prepared, deliver, fail)
        with self._lock:
            new = [media_hash for media_hash in media_hashes if media_hash not in self._waiters]
            for media_hash in media_hashes:
                self._waiters.setdefault(media_hash, {})[request_id] = waiter
            jobs = [_Job(prepared, group) for group in prepared.group_by_picture(new)]
            self._queue += jobs
        for _ in jobs:
            # Not the job itself: one that is cancelled must not lie in the executor, with all its bytes.
            self._threads.submit(self._run_next)

    def forget(self, request_id: str) -> None:
        """What nobody else waits for and has not begun will not be made."""
        with self._lock:
            self._drop_waiter(request_id)

    def close(self) -> None:
        """Nothing more is delivered; returns when what had begun has ended."""
        with self._lock:
            self._queue.clear()
            self._waiters.clear()
        self._threads.shutdown()

    def check_invariants(self) -> None:
        with self._lock:
            for job in self._queue:
                assert job.media_hashes
                assert all(self._waiters[media_hash] for media_hash in job.media_hashes)

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
            for media_hash, pixels in made.items():
                self._deliver(media_hash, pixels)

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

    def _deliver(self, media_hash: str, pixels: Pixels) -> None:
        with self._lock:
            waiters = self._waiters.pop(media_hash, {})
        for waiter in waiters.values():
            _call(waiter.deliver, media_hash, pixels)


def _call(callback: Callable[..., None], *arguments: object) -> None:
    """One who cannot be told must not keep the others from being told."""
    try:
        callback(*arguments)
    except Exception:
        logger.exception("pixels, or their failure, could not be delivered")
