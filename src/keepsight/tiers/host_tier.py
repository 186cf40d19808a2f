"""Embeddings in host memory: found at once, gone with the process.

Invariant: the byte count is that of the entries held, and never more than `max_bytes`.
"""

import threading
from collections.abc import Callable

from keepsight.tiers.fullness import Fullness
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.tier import OnDrop, StoredArray, TierStats, ignore_drop


class HostTier:
    name = "host"

    def __init__(
        self,
        max_bytes: int,
        policy: str = "auto",
        *,
        on_drop: OnDrop = ignore_drop,
        move: Callable[[StoredArray], StoredArray] | None = None,
    ) -> None:
        """`on_drop` is called with evicted keys; `move` puts an array into memory better suited to keep it."""
        self._max_bytes, self._policy_name, self._on_drop, self._move = max_bytes, policy, on_drop, move
        self._fullness = Fullness("host memory", max_bytes)
        self._lock = threading.Lock()
        self._policy = POLICIES[policy](max_bytes)
        self._entries: dict[str, StoredArray] = {}
        self._num_bytes = self._num_evictions = 0

    def has(self, key: str) -> bool:
        return key in self._entries

    def get(self, key: str) -> StoredArray | None:
        with self._lock:
            array = self._entries.get(key)
            if array is not None:
                self._policy.use(key)
            return array

    def prepare(self, key: str, array: StoredArray) -> StoredArray:
        """Move an array that is to be put here. This takes a while, so hold no lock that others wait for."""
        if self._move is None or array.num_bytes > self._max_bytes or self.has(key):
            return array
        return self._move(array)

    def put(self, key: str, array: StoredArray) -> bool:
        if self._fullness.turns_away(array.num_bytes):
            return False
        # Freed after the lock is released, as the engine loop waits for it: unlocking their pages takes a while.
        evicted: list[StoredArray] = []
        with self._lock:
            if key in self._entries:
                self._policy.use(key)
                return True
            while self._num_bytes + array.num_bytes > self._max_bytes:
                victim = self._policy.evict()
                evicted.append(self._entries.pop(victim))
                self._num_bytes -= evicted[-1].num_bytes
                self._num_evictions += 1
                self._on_drop(victim)
            self._policy.add(key, array.num_bytes, array.seconds)
            self._entries[key] = array
            self._num_bytes += array.num_bytes
            return True

    def note_use(self, key: str) -> None:
        with self._lock:
            if key in self._entries:
                self._policy.use(key)

    def clear(self) -> None:
        with self._lock:
            # Bound to a name, so that the entries are freed after the lock is released, too.
            _held, self._entries = self._entries, {}
            self._policy = POLICIES[self._policy_name](self._max_bytes)
            self._num_bytes = 0

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(self._num_bytes, self._max_bytes, len(self._entries), self._num_evictions)

    def close(self) -> None:
        self.clear()

    def check_invariants(self) -> None:
        with self._lock:
            assert self._num_bytes == sum(array.num_bytes for array in self._entries.values()) <= self._max_bytes
            assert len(self._policy) == len(self._entries)
            assert all(key in self._policy for key in self._entries)
