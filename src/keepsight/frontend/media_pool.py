"""A thread pool that has pixels made, each media hash once for all requests that wait for it, and caches them.

Films, which may take minutes, have threads of their own, so that no picture waits for one. Knows neither engine nor
event loop: callers pass callbacks. Invariant: a hash is in `_waiters` (perhaps without any waiter left) exactly while
it is queued or being made, and a queued hash has at least one waiter. Ctrl-C may break it between any two steps, until
the interrupted request is forgotten; so only the queues and `_being_made` say that a hash need not be queued.
"""

import logging
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from keepsight.errors import UnknownMediaError
from keepsight.frontend.media_waiters import MediaWaiters
from keepsight.frontend.pixels.make_pixels import Made, MakePixels, MakingJob, run_job
from keepsight.frontend.pixels.pixel_cache import PixelCache
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.lru_cache import CacheSize
from keepsight.media import ENCODED, MediaItem, Modality
from keepsight.observe.catalogue import DECODED, MISMATCHED, MODALITIES, PREPROCESSED, PROCESSOR, VERIFIED
from keepsight.observe.counters import Counters
from keepsight.observe.mean_cost import MeanCost
from keepsight.pixels import agree
from keepsight.requests import CarriedPixels, Pixels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiter:
    prepared: PreparedRequest
    deliver: Callable[[str, CarriedPixels], None]
    fail: Callable[[Exception], None]
    # True: wants the pixels themselves, not a reference to where they are stored.
    inline: bool


@dataclass(slots=True)
class _Job:
    """One picture to make. Its bytes come from the request that asked first, whichever requests still wait."""

    prepared: PreparedRequest
    media_hashes: list[str]
    # Ignore the cached pixels: they are made again for comparison, or could not be read.
    is_anew: bool

    @property
    def modality(self) -> Modality:
        return self.prepared.modality_of(self.media_hashes[0])

    @property
    def is_decoded(self) -> bool:
        """False if the client sent embeddings."""
        return self.modality in ENCODED


class _Lane:
    """A queue with its own threads: one lane is for pictures and sounds, the other for films."""

    def __init__(self, num_workers: int, name: str, on_thread_start: Callable[[], object]) -> None:
        self.threads = ThreadPoolExecutor(num_workers, thread_name_prefix=name, initializer=on_thread_start)
        # By media hash, in the order in which they were asked for.
        self.queue: OrderedDict[str, _Job] = OrderedDict()


class MediaPool:
    def __init__(
        self,
        num_workers: int,
        cache: PixelCache | None = None,
        make_pixels: MakePixels | None = None,
        verify_hits: float = 0.0,
        counters: Counters | None = None,
        on_thread_start: Callable[[], object] = lambda: None,
    ) -> None:
        """`num_workers`: how many pictures are made at a time, and how many films; by default on the pool's threads.

        `verify_hits`: the fraction of cache hits, 0 to 1, that are made again and compared.
        """
        self._pictures, self._films = (_Lane(num_workers, name, on_thread_start) for name in ("media", "films"))
        self._lanes = (self._pictures, self._films)
        self._lock = threading.Lock()
        self._waiters = MediaWaiters[_Waiter]()
        self._being_made: set[str] = set()
        self._cache = cache or PixelCache()
        self._closing, self._verify_hits = threading.Event(), verify_hits
        self._make_pixels = make_pixels or partial(run_job, is_given_up=self._closing.is_set)
        # Changed only under the lock.
        self._counters = counters or Counters()
        self._making = {modality: MeanCost() for modality in MODALITIES}
        self._note_size()

    def make(
        self,
        prepared: PreparedRequest,
        media_hashes: Collection[str],
        deliver: Callable[[str, CarriedPixels], None],
        fail: Callable[[Exception], None],
        *,
        inline: bool = False,
    ) -> None:
        """Call `deliver` once for each hash; or call `fail`, once, and give up the others.

        Cached pixels are delivered before this returns, all others from one of the pool's threads.
        """
        waiter = _Waiter(prepared, deliver, fail, inline)
        # Touch all of the request's media, or those made first would evict those that it asks for next.
        for item in prepared.engine_request.media:
            self._cache.touch(item.media_hash)
        with self._lock:
            held = self._find_held(media_hashes, inline=inline)
            self._note_queries(prepared, media_hashes)
            checked = {each for each in held if self._is_checked() and prepared.find_unknown([each]) is None}
            found = {each: pixels for each, pixels in held.items() if each not in checked}
            missing = [each for each in media_hashes if each not in found]
            self._note_hits(prepared, found)
            unknown = self._queue_new(waiter, missing, checked)
        if unknown is not None:
            _call(fail, unknown)
            return
        for media_hash, pixels in found.items():
            prepared.account.note_found_pixels(media_hash)
            _call(deliver, media_hash, pixels)

    def forget(self, request_id: str) -> None:
        """Remove a request's waiters. Pixels that no other request waits for are not made, unless that has begun."""
        with self._lock:
            self._drop_waiter(request_id)

    def note_spared(self, items: Iterable[MediaItem]) -> None:
        """Count pixels that an engine found by itself as saved time: only this pool knows what making them takes."""
        if counts := Counter(item.modality for item in items):
            with self._lock:
                self._note_saved(counts)

    def is_held(self, media_hash: str) -> bool:
        """Return whether the pixels are cached. Does not count as a use."""
        return self._cache.is_held(media_hash)

    def reset_cache(self) -> None:
        """Clear the cache, or raise OSError. Pixels that are being made are still kept once they are made."""
        self._cache.clear()
        self.free_cleared()

    def free_cleared(self) -> None:
        """Free the pixels that another frontend has cleared, as any look at the cache does; nothing finds them."""
        with self._lock:
            self._note_size()

    def close(self) -> None:
        """Stop delivering and close the cache; return when all jobs that had begun have ended; films end early."""
        self._closing.set()
        with self._lock:
            for lane in self._lanes:
                lane.queue.clear()
            self._waiters.clear()
        for lane in self._lanes:
            lane.threads.shutdown()
        self._cache.close()

    def check_invariants(self) -> None:
        with self._lock:
            self._waiters.check_invariants()
            assert all(map(self._is_coming, self._waiters))
            for lane in self._lanes:
                for media_hash, job in lane.queue.items():
                    assert media_hash in job.media_hashes
                    assert self._waiters.has_any(media_hash)
                    assert all(lane.queue[each] is job for each in job.media_hashes)
        self._cache.check_invariants()

    def _find_held(self, media_hashes: Collection[str], *, inline: bool) -> dict[str, CarriedPixels]:
        find: Callable[[str], CarriedPixels | None] = self._cache.read if inline else self._cache.get_and_update
        found = {media_hash: find(media_hash) for media_hash in dict.fromkeys(media_hashes)}
        return {media_hash: pixels for media_hash, pixels in found.items() if pixels is not None}

    def _queue_new(
        self, waiter: _Waiter, missing: Collection[str], checked: Collection[str]
    ) -> UnknownMediaError | None:
        """Register the waiter for all of `missing`, and queue what is not yet being made.

        Do neither and return the error if a picture to be made was not sent.
        """
        prepared = waiter.prepared
        new = [media_hash for media_hash in missing if not self._is_coming(media_hash)]
        # Not left to a job: requests that joined it meanwhile would fail too, even one that sent the picture.
        if (unknown := prepared.find_unknown(new)) is not None:
            return unknown
        groups = prepared.group_by_picture(new)
        lanes = [self._films if prepared.modality_of(group[0]) == "video" else self._pictures for group in groups]
        # Submitted first, as that may fail: a queued job always has a thread to come, which waits for the lock.
        for lane in lanes:
            # The job itself is not submitted: a canceled one would stay in the executor, with all its bytes.
            lane.threads.submit(self._run_next, lane)
        for media_hash in missing:
            self._waiters.add(media_hash, prepared.engine_request.request_id, waiter)
        for group, lane in zip(groups, lanes, strict=True):
            job = _Job(prepared, list(group), is_anew=waiter.inline or any(each in checked for each in group))
            lane.queue.update(dict.fromkeys(group, job))
        return None

    def _is_coming(self, media_hash: str) -> bool:
        return media_hash in self._being_made or any(media_hash in lane.queue for lane in self._lanes)

    def _is_checked(self) -> bool:
        return self._verify_hits > 0 and random.random() < self._verify_hits

    def _drop_waiter(self, request_id: str) -> None:
        for media_hash in self._waiters.leave(request_id):
            if media_hash in self._being_made:
                continue
            job = self._pictures.queue.pop(media_hash, None) or self._films.queue.pop(media_hash, None)
            if job is not None:
                job.media_hashes.remove(media_hash)
            self._waiters.take(media_hash)

    def _run_next(self, lane: _Lane) -> None:
        with self._lock:
            if not lane.queue:
                return
            job = next(iter(lane.queue.values()))
            for media_hash in job.media_hashes:
                lane.queue.pop(media_hash, None)  # gone already if dropping it was interrupted
            self._being_made.update(job.media_hashes)
        try:
            with self._cache.making(job.media_hashes):
                carried, made = self._carry_out(job)
        except Exception as error:
            self._fail(job, error)
        else:
            self._deliver(job, carried, made)

    def _carry_out(self, job: _Job) -> tuple[dict[str, CarriedPixels], dict[str, Pixels]]:
        """Return what can be sent for each hash, and the pixels of those that had to be made."""
        # Another frontend may have made them just now.
        held = {} if job.is_anew else self._find_held(job.media_hashes, inline=False)
        made: dict[str, Pixels] = {}
        if missing := [media_hash for media_hash in job.media_hashes if media_hash not in held]:
            made = job.prepared.pixels_of(missing, partial(self._make_timed, job))
            job.prepared.learn(made)
        places = {media_hash: self._keep(media_hash, pixels) for media_hash, pixels in made.items()}
        # Pixels that their siblings have already evicted are sent themselves: otherwise the engine would ask for them,
        # and the picture would be decoded again.
        carried = held | {each: place if self._cache.is_held(each) else made[each] for each, place in places.items()}
        with self._lock:
            self._note_hits(job.prepared, held)
            self._note_made(job, len(made) if job.is_decoded else 0)
        return carried, made

    def _make_timed(self, job: _Job, picture: MakingJob) -> Made:
        began = time.monotonic()
        made = self._make_pixels(picture)
        ended = time.monotonic()
        if not job.is_decoded:
            return made
        decoding, resizing = made.seconds
        if not (decoding >= 0 <= resizing and decoding + resizing <= ended - began):  # workers are not trusted
            decoding, resizing = ended - began, 0.0
        job.prepared.account.note_made(began, began + decoding, began + decoding + resizing, tuple(made.pixels))
        with self._lock:
            # Not `ended - began`: the first items of a worker also wait for its start.
            self._making[job.modality].note(decoding + resizing, len(made.pixels))
        return made

    def _note_made(self, job: _Job, num_made: int) -> None:
        self._counters.add(DECODED[job.modality], num_made > 0)
        self._counters.add(PREPROCESSED[job.modality], num_made)
        self._note_size()

    def _note_queries(self, prepared: PreparedRequest, media_hashes: Iterable[str]) -> None:
        if self._cache.is_any:
            for modality, count in prepared.count_modalities(set(media_hashes)).items():
                self._counters.add(PROCESSOR.queries[modality], count)

    def _note_hits(self, prepared: PreparedRequest, held: Iterable[str]) -> None:
        counts = prepared.count_modalities(held)
        for modality, count in counts.items():
            self._counters.add(PROCESSOR.hits[modality], count)
        self._note_saved(counts)

    def _note_saved(self, counts: Counter[Modality]) -> None:
        for modality, count in counts.items():
            self._counters.add(PROCESSOR.saved_seconds[modality], count * self._making[modality].seconds)

    def _note_size(self) -> None:
        self._counters.follow(PROCESSOR.evictions, self._cache.num_evictions)
        if not self._cache.is_common:
            self._counters.set_all(_slots_of(self._cache.size()))

    def common_sizes(self) -> dict[int, float]:
        """Return the sizes, by counter slot, of a cache that all processes share: none of them reports it by itself."""
        return _slots_of(self._cache.size()) if self._cache.is_common else {}

    def _keep(self, media_hash: str, pixels: Pixels) -> CarriedPixels:
        if self._verify_hits:
            self._compare(media_hash, pixels)
        return self._cache.put(media_hash, pixels)

    def _compare(self, media_hash: str, pixels: Pixels) -> None:
        held = self._cache.read(media_hash)
        if held is None:
            return
        is_right = agree(media_hash, held, pixels)
        with self._lock:
            self._counters.add(VERIFIED)
            self._counters.add(MISMATCHED, not is_right)
        if not is_right:
            self._cache.drop(media_hash)

    def _fail(self, job: _Job, error: Exception) -> None:
        failed: dict[str, tuple[str, _Waiter]] = {}
        with self._lock:
            self._being_made.difference_update(job.media_hashes)
            for media_hash in job.media_hashes:
                for request_id, waiter in self._waiters.take(media_hash).items():
                    failed.setdefault(request_id, (media_hash, waiter))
            for request_id in failed:
                self._drop_waiter(request_id)
        for media_hash, waiter in failed.values():
            _call(waiter.fail, waiter.prepared.as_own(error, media_hash))

    def _deliver(self, job: _Job, carried: Mapping[str, CarriedPixels], made: Mapping[str, Pixels]) -> None:
        """Deliver to all waiters. The pixels are cached before this takes the waiters: no request begins them anew."""
        with self._lock:
            self._being_made.difference_update(job.media_hashes)
            waiters = {media_hash: self._waiters.take(media_hash) for media_hash in carried}
        for media_hash, pixels in carried.items():
            for waiter in waiters[media_hash].values():
                account = waiter.prepared.account
                # They were made just now by another frontend, or for another request that had begun the job.
                if media_hash not in made or account is not job.prepared.account:
                    account.note_found_pixels(media_hash)
                in_hand = made.get(media_hash, pixels) if waiter.inline else pixels
                _call(waiter.deliver, media_hash, in_hand)


def _slots_of(size: CacheSize | None) -> dict[int, float]:
    return {} if size is None else PROCESSOR.sizes(size.num_bytes, size.max_bytes, size.num_entries)


def _call(callback: Callable[..., None], *arguments: object) -> None:
    """Call `callback`. One that raises must not keep the others from being called."""
    try:
        callback(*arguments)
    except Exception:
        logger.exception("pixels, or their failure, could not be delivered")
