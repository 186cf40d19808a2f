"""All tiers as one store, with write-behind and read-ahead: the caller never waits.

Knows neither requests nor devices. The tiers are asked in order, nearest first; what a far one returns is put into the
nearer ones. Invariant: each `load` is answered exactly once, with the array or None, at the latest after the time that
the most patient caller waiting for the entry allows; what comes later is dropped.
"""

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.tier import OnDrop, StoredArray, Tier, TierStats, ignore_drop
from keepsight.tiers.tier_guard import DEFAULT_LIMITS, GuardLimits, TierGuard
from keepsight.tiers.tier_worker import Read, TierWorker

# Called with the array and the tier that had it, or with None for both.
OnLoaded = Callable[[StoredArray | None, str | None], None]

_MAX_WAITING_BYTES = 512 * 2**20
_CLOSING_SECONDS = 5.0


@dataclass(slots=True)
class _Loading:
    key: str
    deadline: float
    waiting: list[OnLoaded]
    # The number of clears before the load was requested.
    epoch: int
    # The number of tiers asked so far.
    num_tried: int = 0


class TieredStore:
    """Thread-safe."""

    def __init__(
        self,
        host: HostTier | None,
        others: Sequence[Tier],
        *,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        keeps_first: bool = False,
        on_drop: OnDrop = ignore_drop,
        limits: GuardLimits = DEFAULT_LIMITS,
        content: str = "embeddings",
    ) -> None:
        """`others`: nearest first. `on_drop` gets the keys that waited to be written and are not known to be held.

        `content`: what the entries are, for the log.
        """
        # Number of loads answered, by the tier that had the entry.
        self.hits = Counter[str]()
        # An operation of a tier that takes longer counts as never returning.
        self.stuck_seconds = limits.stuck_seconds
        self._host = host
        self._workers = [
            TierWorker(
                tier,
                TierGuard(f"{tier.name} tier of {content}", limits),
                max_waiting_bytes,
                on_drop,
                keeps_first=keeps_first,
            )
            for tier in others
        ]
        # All tiers, nearest first.
        self._tiers: list[HostTier | TierWorker] = [*([host] if host is not None else []), *self._workers]
        self._changed = threading.Condition()
        self._loadings: dict[str, _Loading] = {}
        # Held while clearing all tiers, and while filling nearer tiers from farther ones: no cleared entry comes back.
        self._filling = threading.Lock()
        self._epoch = 0
        # A heap of the deadlines of all loadings, and of some that are over.
        self._deadlines: list[tuple[float, int, _Loading]] = []
        self._numbers = count()
        self._is_closed = False
        self._timer = threading.Thread(target=self._end_late_ones, name="tiers-deadlines", daemon=True)
        self._timer.start()

    def find(self, key: str) -> str | None:
        """Return the nearest tier that is known to hold the key, without I/O; other tiers may hold it, too."""
        return next((tier.name for tier in self._tiers if tier.has(key)), None)

    def list_holders(self, key: str) -> tuple[str, ...]:
        """Return all tiers that are known to hold the key, nearest first, without I/O."""
        return tuple(tier.name for tier in self._tiers if tier.has(key))

    def load(self, key: str, patience: float, on_loaded: OnLoaded) -> None:
        """Load an entry and call back exactly once: immediately if in host memory, else on a thread of the tiers.

        `patience`: the seconds to wait, usually those that recomputing the entry would take.
        """
        deadline = time.monotonic() + patience
        array = self._host.get(key) if self._host is not None else None
        if array is not None:
            with self._changed:
                self.hits["host"] += 1
            on_loaded(array, "host")
            return
        with self._changed:
            joined = self._loadings.get(key)
            if joined is not None:
                joined.waiting.append(on_loaded)
                joined.deadline = max(joined.deadline, deadline)
                return
            loading = _Loading(key, deadline, [on_loaded], self._epoch)
            self._loadings[key] = loading
            heapq.heappush(self._deadlines, (loading.deadline, next(self._numbers), loading))
            if self._deadlines[0][2] is loading:
                self._changed.notify_all()
        self._ask_next(loading)

    def prepare(self, key: str, array: StoredArray) -> StoredArray:
        """Return the array as `store` should get it. This may take a while; storing it does not."""
        return array if self._host is None else self._host.prepare(key, array)

    def store(self, key: str, array: StoredArray) -> None:
        """Put an array into all tiers. Its memory belongs to them from now on, and must not be changed."""
        for tier in self._tiers:
            tier.put(key, array)

    def note_use(self, key: str) -> None:
        """Note a use of an entry that was not loaded. Takes effect soon, behind waiting writes."""
        for tier in self._tiers:
            tier.note_use(key)

    def clear(self, on_cleared: Callable[[], object] = lambda: None) -> None:
        """Clear all tiers soon. Loads in progress are answered with None.

        `on_cleared` is called on a thread of the tiers after each that took some time.
        """
        with self._filling:
            if self._host is not None:
                self._host.clear()
            for worker in self._workers:
                worker.clear(on_cleared)
            self._epoch += 1
        for loading in list(self._loadings.values()):
            self._finish(loading)

    @property
    def is_cleared(self) -> bool:
        """True if no tier is still to be cleared: what was there before the last `clear` is gone for good."""
        return all(worker.is_cleared for worker in self._workers)

    def list_unasked(self) -> frozenset[str]:
        """Return the tiers that a load would not ask now, as they are set aside."""
        return frozenset(worker.name for worker in self._workers if not worker.guard.is_usable)

    def why_unused(self) -> dict[str, str | None]:
        """Return why each tier is not used, or None if it is; host memory is always used."""
        return {worker.name: worker.guard.why_unused() for worker in self._workers}

    def stats(self) -> dict[str, TierStats]:
        return {tier.name: tier.stats() for tier in self._tiers}

    @property
    def num_left_out(self) -> dict[str, int]:
        """The number of entries, by tier, not put there because too much waited, it was set aside, or had no room."""
        return {worker.name: worker.num_left_out for worker in self._workers}

    def wait_opened(self, seconds: float) -> bool:
        """Wait until it is known what all usable tiers hold; before that, less may be found than there is."""
        return all(worker.wait_opened(seconds) for worker in self._workers)

    def wait_written(self, seconds: float) -> bool:
        return all(worker.wait_written(seconds) for worker in self._workers)

    def close(self) -> None:
        """Close all tiers, after a little time for waiting writes."""
        end = time.monotonic() + _CLOSING_SECONDS
        for worker in self._workers:
            worker.finish(end - time.monotonic())
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.close(_CLOSING_SECONDS)
        for loading in list(self._loadings.values()):
            self._finish(loading)
        self._timer.join()
        if self._host is not None:
            self._host.close()

    # Loading --------------------------------------------------------------------------------------------------

    def _ask_next(self, loading: _Loading) -> None:
        while loading.num_tried < len(self._workers):
            worker = self._workers[loading.num_tried]
            loading.num_tried += 1
            left = loading.deadline - time.monotonic()
            if left > 0 and worker.try_read(self._reading(loading, worker), left):
                return
        self._finish(loading)

    def _reading(self, loading: _Loading, worker: TierWorker) -> Read:
        def on_read(array: StoredArray | None) -> None:
            if array is None:
                self._ask_next(loading)
            elif self._finish(loading, array, worker.name):
                self._promote(loading, array, worker)

        return Read(loading.key, lambda: self._is_under_way(loading), on_read)

    def _is_under_way(self, loading: _Loading) -> bool:
        return self._loadings.get(loading.key) is loading

    def _finish(self, loading: _Loading, array: StoredArray | None = None, tier: str | None = None) -> bool:
        """Answer a loading. Return False if it was already answered, or is answered with None."""
        with self._changed:
            if not self._is_under_way(loading):
                return False
            # Late, but the timer thread may not have got to it yet.
            if time.monotonic() > loading.deadline:
                array = tier = None
            del self._loadings[loading.key]
            if tier is not None:
                self.hits[tier] += 1
        for on_loaded in loading.waiting:
            on_loaded(array, tier)
        return array is not None

    def _promote(self, loading: _Loading, array: StoredArray, source: TierWorker) -> None:
        array = self.prepare(loading.key, array)
        with self._filling:
            if loading.epoch != self._epoch:
                return
            for tier in self._tiers:
                if tier is source:
                    break
                tier.put(loading.key, array)

    def _end_late_ones(self) -> None:
        while not self._is_closed:
            for loading in self._late_ones():
                self._finish(loading)

    def _late_ones(self) -> list[_Loading]:
        """Wait until some loadings are late and return them; none if the store is closed."""
        with self._changed:
            while not self._is_closed:
                late = []
                while self._deadlines and self._is_over(self._deadlines[0]):
                    placed_for, number, loading = heapq.heappop(self._deadlines)
                    if loading.deadline > placed_for:  # a more patient caller has joined since
                        heapq.heappush(self._deadlines, (loading.deadline, number, loading))
                    else:
                        late.append(loading)
                if late:
                    return late
                left = self._deadlines[0][0] - time.monotonic() if self._deadlines else None
                self._changed.wait(left)
            return []

    def _is_over(self, place: tuple[float, int, _Loading]) -> bool:
        return place[0] <= time.monotonic() or not self._is_under_way(place[2])

    def check_invariants(self) -> None:
        for tier in self._tiers:
            tier.check_invariants()
        with self._changed:
            placed = {id(loading) for _, _, loading in self._deadlines}
            assert all(loading.waiting for loading in self._loadings.values())
            assert len(placed) == len(self._deadlines)
