"""Tracks which media items' embeddings are held, which sequences use them, and which are evicted to make room.

An entry is *being encoded* or *ready*; it is *in use* by (sequence, item) pairs or *idle* (ready, kept for later
requests, evictable). It is *protected* while a sequence could not get it again: then it becomes idle even if it is
neither shared nor findable, and is evicted after all else. Protected entries leave others a part of the budget, and
all of it to an item that does not fit into that part, or once nothing is in use. Holds no tensors: the next plan tells
the runner what was evicted. Invariant: an entry is evicted whole and never while it is in use or being encoded, and the
entries never exceed the budget.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from keepsight.engine_config import EncoderCacheConfig
from keepsight.lru_cache import PINNABLE_PART
from keepsight.media import MediaItem
from keepsight.requests import Adapter
from keepsight.scheduling.eviction_order import EvictionOrder
from keepsight.scheduling.holdings import Holdings
from keepsight.scheduling.step_plan import SequenceId

logger = logging.getLogger(__name__)

# A sequence and the index of one of its request's media items.
EncoderUser = tuple[SequenceId, int]


def encoder_key(item: MediaItem, adapter: Adapter | None) -> str:
    """Return the name of the item's embeddings: its media hash, with the adapter if that changes them."""
    if adapter is None or not adapter.changes_encoder:
        return item.media_hash
    return json.dumps([item.media_hash, adapter.name, adapter.digest])


@dataclass(slots=True)
class _Entry:
    media_hash: str
    num_bytes: int
    users: set[EncoderUser]
    is_ready: bool = False
    # False once forgotten: its users keep it, but new ones cannot find it.
    is_findable: bool = True
    # True if larger than the whole budget, and so held outside it.
    is_oversized: bool = False


class EncoderCacheManager:
    def __init__(self, config: EncoderCacheConfig, holdings: Holdings) -> None:
        self.num_bytes = 0  # without an entry held outside the budget
        self.num_evictions = 0
        self._config = config
        # Counts the findable entries. Unshared ones go into an object that is never read.
        self._holdings = holdings if config.is_shared else Holdings()
        self._entries: dict[str, _Entry] = {}
        self._idle: EvictionOrder[str] = EvictionOrder(config.max_bytes)
        self._num_idle_bytes = 0
        # Idle entries that are protected, least recently released first; they are not in `_idle`.
        self._protected: dict[str, None] = {}
        self._num_protected_bytes = 0
        # With more of them, they are evicted like others, or nothing could be encoded ahead of its need.
        self._max_protected_bytes = int(config.max_bytes * PINNABLE_PART)
        # For whom each key is protected, whether or not it is held.
        self._protectors: dict[str, set[EncoderUser]] = {}
        self._evicted: list[str] = []
        self._has_warned = False

    @property
    def max_bytes(self) -> int:
        return self._config.max_bytes

    @property
    def num_free_embeddings(self) -> int:
        """The number of embeddings for which there is free or evictable room, whatever is in use."""
        return self._num_free_bytes // self._config.bytes_per_embedding

    @property
    def _num_free_bytes(self) -> int:
        num_idle_bytes = self._num_idle_bytes + self._num_protected_bytes
        return self._config.max_bytes - self.num_bytes + num_idle_bytes - self._num_kept_bytes

    @property
    def _num_kept_bytes(self) -> int:
        """How much idle entries that are protected keep from others."""
        return min(self._num_protected_bytes, self._max_protected_bytes)

    @property
    def num_pinned_bytes(self) -> int:
        return self._idle.size_of_pinned

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def is_ready(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_ready

    def can_find(self, key: str, user: EncoderUser | None = None) -> bool:
        """Return whether `try_use` would succeed; without a user, for one for whom nothing is protected."""
        entry = self._entries.get(key)
        return entry is not None and (entry.is_findable or user in self._protectors.get(key, ()))

    def is_held(self, key: str) -> bool:
        """Return whether the embeddings are held and would be found."""
        return self.can_find(key) and self.is_ready(key)

    def is_used(self, key: str) -> bool:
        return bool(self._entries[key].users)

    # Allocation -----------------------------------------------------------------------------------------------

    def try_use(self, user: EncoderUser, key: str) -> bool:
        """Add a user to an entry that is ready or being encoded. Return False if there is none."""
        if not self.can_find(key, user):
            return False
        self._take_from_idle(key)
        self._entries[key].users.add(user)
        return True

    def try_begin(
        self,
        user: EncoderUser,
        key: str,
        num_embeddings: int,
        media_hash: str | None = None,
        *,
        spares_protected: bool = False,
    ) -> bool:
        """Create an entry to be encoded, with one user. Return False, changing nothing, if there can be no room now.

        `media_hash` names the media item, if the key is not that hash. With `spares_protected`, protected entries keep
        their part of the budget even if nothing is in use.
        """
        if (forgotten := self._entries.get(key)) is not None:
            # The runner knows embeddings by key alone, so the new entry waits until the one with its key is dropped.
            assert not forgotten.is_findable, f"{key} is held already"
            if key not in self._protected:
                return False
            # It leaves room for the new entry, which those for whom it was protected find in its place.
            self._drop_idle(key)
        entry = _Entry(media_hash or key, num_embeddings * self._config.bytes_per_embedding, {user})
        entry.is_oversized = entry.num_bytes > self._config.max_bytes
        if entry.is_oversized:
            has_room = self._can_hold_oversized(entry)
        else:
            has_room = self._try_make_room(entry.num_bytes, spares_protected=spares_protected)
        if not has_room:
            return False
        self._entries[key] = entry
        self._holdings.add(entry.media_hash)
        self.num_bytes += 0 if entry.is_oversized else entry.num_bytes
        return True

    def _can_hold_oversized(self, newcomer: _Entry) -> bool:
        if any(entry.is_oversized for entry in self._entries.values()):
            return False
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "embeddings of %d bytes exceed the encoder cache of %d: they are served one at a time, not cached",
                newcomer.num_bytes,
                self._config.max_bytes,
            )
        return True

    def _try_make_room(self, num_bytes: int, *, spares_protected: bool) -> bool:
        if num_bytes > self._num_free_bytes:
            # What is in use is released sooner or later, and may leave its room instead.
            may_wait = num_bytes <= self._config.max_bytes - self._num_kept_bytes
            if spares_protected or may_wait or num_bytes > self._num_free_bytes + self._num_kept_bytes:
                return False
        while num_bytes > self._config.max_bytes - self.num_bytes:
            self._drop_idle(self._idle.first() if self._idle else next(iter(self._protected)))
            self.num_evictions += 1
        return True

    # Results of the encoding ----------------------------------------------------------------------------------

    def finish(self, key: str) -> None:
        """Note that the entry's embeddings are held from now on."""
        entry = self._entries[key]
        assert not entry.is_ready, key
        entry.is_ready = True
        if not entry.users:
            self._retire(key, entry)

    def fail(self, key: str) -> set[EncoderUser]:
        """Remove an entry whose encoding failed. Return its users."""
        entry = self._entries[key]
        assert not entry.is_ready, key
        self._remove(key)
        return entry.users

    # Release and eviction -------------------------------------------------------------------------------------

    def release(self, user: EncoderUser, key: str) -> None:
        """Remove a user. An entry without users becomes idle, or is dropped if it cannot be kept."""
        entry = self._entries[key]
        entry.users.remove(user)
        # While an entry is being encoded the runner writes to it: its bytes are free only afterwards.
        if entry.is_ready and not entry.users:
            self._retire(key, entry)

    def _retire(self, key: str, entry: _Entry) -> None:
        if key in self._protectors and not entry.is_oversized:
            self._protected[key] = None
            self._num_protected_bytes += entry.num_bytes
        elif self._config.is_shared and entry.is_findable and not entry.is_oversized:
            self._idle.add(key)
            self._num_idle_bytes += entry.num_bytes
        else:
            self._drop(key)

    def protect(self, user: EncoderUser, key: str) -> None:
        """Keep embeddings, if they are held now or later, for a user who could not get them again."""
        self._protectors.setdefault(key, set()).add(user)
        if key in self._idle:
            self._take_from_idle(key)
            self._retire(key, self._entries[key])

    def end_protection(self, user: EncoderUser, key: str) -> None:
        """End one user's protection of a key, if there is any."""
        protectors = self._protectors.get(key, set())
        protectors.discard(user)
        if protectors or self._protectors.pop(key, None) is None:
            return
        if key in self._protected:
            self._take_from_idle(key)
            self._retire(key, self._entries[key])

    def pin(self, key: str, until: float) -> None:
        """Pin an entry, so that unpinned ones are evicted before it, if it can be found and not too much is pinned."""
        if self.can_find(key) and self._config.is_shared:
            self._idle.pin(key, until, self._entries[key].num_bytes)

    def end_pins(self, now: float) -> None:
        self._idle.end_pins(now)

    def forget(self) -> None:
        """Make all entries unfindable, but for those who use them or for whom they are protected."""
        while self._idle:
            self._drop_idle(self._idle.first())
        for entry in self._entries.values():
            self._hide(entry)
        self._idle.clear()

    def _hide(self, entry: _Entry) -> None:
        if entry.is_findable:
            self._holdings.remove(entry.media_hash)
        entry.is_findable = False

    def _drop_idle(self, key: str) -> None:
        self._take_from_idle(key)
        self._drop(key)

    def _take_from_idle(self, key: str) -> None:
        """Take an entry out of those that are idle, protected or not, if it is one of them."""
        if key in self._idle:
            self._idle.remove(key)
            self._num_idle_bytes -= self._entries[key].num_bytes
        elif key in self._protected:
            del self._protected[key]
            self._num_protected_bytes -= self._entries[key].num_bytes

    def _drop(self, key: str) -> None:
        self._remove(key)
        self._evicted.append(key)

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._idle.forget(key)
        self._hide(entry)
        self.num_bytes -= 0 if entry.is_oversized else entry.num_bytes

    def take_evicted(self) -> tuple[str, ...]:
        """Return the keys that the runner must drop, each once. It drops them before the same plan encodes anew."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def uses(self) -> Iterator[tuple[EncoderUser, str]]:
        """Yield each (user, key) pair, for recounts."""
        return ((user, key) for key, entry in self._entries.items() for user in entry.users)

    def protections(self) -> Iterator[tuple[EncoderUser, str]]:
        """Yield each (user, key) pair for which there is protection, for recounts."""
        return ((user, key) for key, users in self._protectors.items() for user in users)

    def held_media(self) -> Iterator[str]:
        """Yield the media hash of each findable entry, for recounts."""
        return (each.media_hash for each in self._entries.values() if each.is_findable and self._config.is_shared)

    def check_invariants(self) -> None:
        in_budget = {key: entry for key, entry in self._entries.items() if not entry.is_oversized}
        assert self.num_bytes == sum(entry.num_bytes for entry in in_budget.values())
        assert self.num_bytes <= self._config.max_bytes
        assert len(self._entries) - len(in_budget) <= 1
        idle = {key: entry for key, entry in self._entries.items() if entry.is_ready and not entry.users}
        protected = {key: entry for key, entry in idle.items() if key in self._protectors}
        assert all(self._protectors.values())
        assert self._protected.keys() == protected.keys()
        assert set(self._idle) == idle.keys() - protected.keys()
        assert self._num_protected_bytes == sum(entry.num_bytes for entry in protected.values())
        assert self._num_idle_bytes == sum(idle[key].num_bytes for key in self._idle)
        assert all(idle[key].is_findable for key in self._idle)
        assert not any(entry.is_oversized for entry in idle.values())
        assert self._config.is_shared or not self._idle
        self._idle.check_invariants()
