"""An LRU cache of values by key, bounded in bytes.

Not thread-safe: users that share one must lock it. A key always names the same value, so putting it again only marks it
as used. Invariant: `num_bytes` is the size of what is held, and never more than `max_bytes`.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Generic, TypeVar

from keepsight.errors import EverythingPinnedError

logger = logging.getLogger(__name__)

# The part of a cache that callers may pin: more would leave too little room for unpinned entries.
PINNABLE_PART = 0.5

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CacheStat:
    hits: int
    total: int


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of any cache: what it holds and may hold, and how many entries were evicted."""

    num_bytes: int
    max_bytes: int
    num_entries: int
    num_evictions: int


@dataclass(frozen=True, slots=True)
class _Entry(Generic[V]):
    value: V
    num_bytes: int


class LruCache(Generic[K, V]):
    def __init__(
        self, max_bytes: int, size_of: Callable[[V], int], on_drop: Callable[[K], object] = lambda _: None
    ) -> None:
        """`size_of` returns the bytes that dropping a value would free; `on_drop` is called with each dropped key."""
        self._max_bytes, self._size_of, self._on_drop = max_bytes, size_of, on_drop
        # The least recently used first.
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._pins: set[K] = set()
        # Keys to evict before all others, the last of them first.
        self._first: dict[K, None] = {}
        self.num_bytes = 0
        self.num_pinned_bytes = 0
        self.num_evictions = 0
        self._hits = self._total = 0
        self._reported = CacheStat(0, 0)
        self._has_warned = False

    # Lookups --------------------------------------------------------------------------------------------------

    def is_cached(self, key: K) -> bool:
        return key in self._entries

    def bytes_of(self, key: K) -> int:
        """Return the size of an entry. Raise KeyError if it is not held."""
        return self._entries[key].num_bytes

    def look(self, key: K) -> V | None:
        """Return the value, or None, without counting it as a use."""
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def newest(self, limit: int) -> list[K]:
        """Return the most recently used keys, the last used first."""
        return list(islice(reversed(self._entries), limit))

    def get_and_update(self, key: K) -> V | None:
        """Return the value, or None; counted as a use, found or not."""
        self._total += 1
        if not self.touch(key):
            return None
        self._hits += 1
        return self._entries[key].value

    def touch(self, key: K) -> bool:
        """Make it the most recently used, without counting a use. Return False if it is not held."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        return True

    def stat(self, *, delta: bool = False) -> CacheStat:
        """Return the counts of all uses, or with `delta` of those since the last such call."""
        now = CacheStat(self._hits, self._total)
        if not delta:
            return now
        before, self._reported = self._reported, now
        return CacheStat(now.hits - before.hits, now.total - before.total)

    def size(self) -> CacheSize:
        return CacheSize(self.num_bytes, self._max_bytes, len(self._entries), self.num_evictions)

    # Insertion and eviction -----------------------------------------------------------------------------------

    def put_if_fits(self, key: K, value: V) -> bool:
        """Store a value. Return False if it is larger than the whole cache.

        Raise EverythingPinnedError if too much is pinned to make room for it.
        """
        if self.touch(key):
            return True
        num_bytes = self._size_of(value)
        if num_bytes > self._max_bytes:
            self._warn_once(num_bytes)
            return False
        self._make_room(num_bytes)
        self._entries[key] = _Entry(value, num_bytes)
        self.num_bytes += num_bytes
        return True

    def pin(self, key: K) -> None:
        """Keep an entry until it is unpinned, however often it was pinned. Raise KeyError if it is not held."""
        entry = self._entries[key]
        if key not in self._pins:
            self._pins.add(key)
            self.num_pinned_bytes += entry.num_bytes

    def unpin(self, key: K) -> None:
        """Undo `pin`. Raise KeyError if it is not pinned."""
        self._pins.remove(key)
        self.num_pinned_bytes -= self._entries[key].num_bytes

    def evict_first(self, key: K) -> None:
        """Evict this entry before all that are not so marked, however they are used; pins hold. No-op if not held."""
        if key in self._entries:
            self._first.pop(key, None)
            self._first[key] = None

    def undo_evict_first(self, key: K) -> None:
        """Undo `evict_first`, and make the entry the most recently used."""
        self._first.pop(key, None)
        self.touch(key)

    def drop(self, key: K) -> None:
        """Drop an entry, unless it is pinned or not held."""
        if key in self._entries and key not in self._pins:
            self._drop(key)

    def clear(self) -> None:
        """Drop all entries that are not pinned."""
        for key in self._entries.keys() - self._pins:
            self._drop(key)

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes - self.num_pinned_bytes:
            raise EverythingPinnedError(num_bytes, self._max_bytes, self.num_pinned_bytes)
        while num_bytes > self._max_bytes - self.num_bytes:
            self._drop(next(key for key in chain(reversed(self._first), self._entries) if key not in self._pins))
            self.num_evictions += 1

    def _drop(self, key: K) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
        self._first.pop(key, None)
        self._on_drop(key)

    def _warn_once(self, num_bytes: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "an item of %d bytes exceeds the cache of %d bytes: such items are served but not cached",
                num_bytes,
                self._max_bytes,
            )

    def check_invariants(self) -> None:
        assert self._pins <= self._entries.keys()
        assert self._first.keys() <= self._entries.keys()
        assert self.num_bytes == sum(self._size_of(entry.value) for entry in self._entries.values())
        assert self.num_pinned_bytes == sum(self._entries[key].num_bytes for key in self._pins)
        assert self.num_pinned_bytes <= self.num_bytes <= self._max_bytes
        assert 0 <= self._reported.hits <= self._hits <= self._total
