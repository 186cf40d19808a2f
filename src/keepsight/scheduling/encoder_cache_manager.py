"""Which media items' embeddings are held, by whom they are used, and which make room for others.

An entry is *being encoded* or *ready*; it is *in use* by (sequence, item) pairs or *idle* (ready, kept for those who
ask again, evictable).  Holds no tensors: the runner is told what was evicted with the next plan.  Its invariant: an
entry is evicted whole and never while it is in use or being encoded, and what is held never exceeds the budget.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from keepsight.engine_config import EncoderCacheConfig
from keepsight.media import MediaItem
from keepsight.requests import Adapter
from keepsight.scheduling.eviction_order import EvictionOrder
from keepsight.scheduling.holdings import Holdings
from keepsight.scheduling.step_plan import SequenceId

logger = logging.getLogger(__name__)

# A sequence, and which of its request's media items.
EncoderUser = tuple[SequenceId, int]


def encoder_key(item: MediaItem, adapter: Adapter | None) -> str:
    """The name of the item's embeddings: its media hash, with the adapter if that changes them."""
    if adapter is None or not adapter.changes_encoder:
        return item.media_hash
    return json.dumps([item.media_hash, adapter.name, adapter.digest])


@dataclass(slots=True)
class _Entry:
    media_hash: str
    num_bytes: int
    users: set[EncoderUser]
    is_ready: bool = False
    # False: forgotten.  Its users keep it, newcomers do not find it.
    is_findable: bool = True
    # Larger than the whole budget, and held outside it.
    is_oversized: bool = False


class EncoderCacheManager:
    def __init__(self, config: EncoderCacheConfig, holdings: Holdings) -> None:
        self.num_bytes = 0  # without what is held outside the budget
        self.num_evictions = 0
        self._config = config
        # Counts the entries that newcomers find; of what is not shared nobody asks.
        self._holdings = holdings if config.is_shared else Holdings()
        self._entries: dict[str, _Entry] = {}
        self._idle: EvictionOrder[str] = EvictionOrder(config.max_bytes)
        self._num_idle_bytes = 0
        self._evicted: list[str] = []
        self._has_warned = False

    @property
    def max_bytes(self) -> int:
        return self._config.max_bytes

    @property
    def num_embeddings_to_be_had(self) -> int:
        """What is free or evictable."""
        return (self._config.max_bytes - self.num_bytes + self._num_idle_bytes) // self._config.bytes_per_embedding

    @property
    def num_pinned_bytes(self) -> int:
        return self._idle.size_of_pinned

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def is_ready(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.is_ready

    def can_find(self, key: str) -> bool:
        """Whether `try_use` would succeed."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_findable

    def is_used(self, key: str) -> bool:
        return bool(self._entries[key].users)

    # Coming ---------------------------------------------------------------------------------------------------

    def try_use(self, user: EncoderUser, key: str) -> bool:
        """Uses what is held or being encoded; False if there is nothing to use."""
        if not self.can_find(key):
            return False
        entry = self._entries[key]
        if key in self._idle:
            self._idle.remove(key)
            self._num_idle_bytes -= entry.num_bytes
        entry.users.add(user)
        return True

    def try_begin(self, user: EncoderUser, key: str, num_embeddings: int, media_hash: str | None = None) -> bool:
        """Makes room for what will be encoded, and uses it; False, and nothing is changed, if there can be none now.

        `media_hash` is what it is made of, where the key is another.
        """
        forgotten = self._entries.get(key)
        if forgotten is not None:
            # The runner knows embeddings by their key alone, so the newcomer waits until its namesake is dropped.
            assert not forgotten.is_findable, f"{key} is held already"
            return False
        entry = _Entry(media_hash or key, num_embeddings * self._config.bytes_per_embedding, {user})
        entry.is_oversized = entry.num_bytes > self._config.max_bytes
        if not (self._can_hold_oversized(entry) if entry.is_oversized else self._try_make_room(entry.num_bytes)):
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
                "embeddings of %d bytes exceed the encoder cache of %d: such items are served one at a time, not kept",
                newcomer.num_bytes,
                self._config.max_bytes,
            )
        return True

    def _try_make_room(self, num_bytes: int) -> bool:
        num_spare_bytes = self._config.max_bytes - self.num_bytes
        if num_bytes > num_spare_bytes + self._num_idle_bytes:
            return False
        while num_bytes > self._config.max_bytes - self.num_bytes:
            self._drop_idle(self._idle.first())
            self.num_evictions += 1
        return True

    # What became of the encoding ------------------------------------------------------------------------------

    def finish(self, key: str) -> None:
        """Its embeddings are held from now on."""
        entry = self._entries[key]
        assert not entry.is_ready, key
        entry.is_ready = True
        if not entry.users:
            self._retire(key, entry)

    def fail(self, key: str) -> set[EncoderUser]:
        """There will be no embeddings; those who waited for them."""
        entry = self._entries[key]
        assert not entry.is_ready, key
        self._remove(key)
        return entry.users

    # Going ----------------------------------------------------------------------------------------------------

    def release(self, user: EncoderUser, key: str) -> None:
        """What nobody uses any more becomes idle, or is dropped if it cannot be kept."""
        entry = self._entries[key]
        entry.users.remove(user)
        # While it is being encoded the runner writes it: its bytes are free only after that.
        if entry.is_ready and not entry.users:
            self._retire(key, entry)

    def _retire(self, key: str, entry: _Entry) -> None:
        if self._config.is_shared and entry.is_findable and not entry.is_oversized:
            self._idle.add(key)
            self._num_idle_bytes += entry.num_bytes
        else:
            self._drop(key)

    def pin(self, key: str, until: float) -> None:
        """If it can be found, and not too much is pinned already: it goes after all that is not pinned."""
        if self.can_find(key) and self._config.is_shared:
            self._idle.pin(key, until, self._entries[key].num_bytes)

    def end_pins(self, now: float) -> None:
        self._idle.end_pins(now)

    def forget(self) -> None:
        """Nothing held or being encoded is found again; those who use it keep it to the end."""
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
        self._num_idle_bytes -= self._entries[key].num_bytes
        self._drop(key)

    def _drop(self, key: str) -> None:
        self._remove(key)
        self._evicted.append(key)

    def _remove(self, key: str) -> None:
        entry = self._entries.pop(key)
        self._idle.forget(key)
        self._hide(entry)
        self.num_bytes -= 0 if entry.is_oversized else entry.num_bytes

    def take_evicted(self) -> tuple[str, ...]:
        """What the runner is to drop, each told once.  A key may be begun again in the same plan: dropped first."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def uses(self) -> Iterator[tuple[EncoderUser, str]]:
        """For recounts: who uses which entry."""
        return ((user, key) for key, entry in self._entries.items() for user in entry.users)

    def held_media(self) -> Iterator[str]:
        """For recounts: once for each entry that newcomers find."""
        return (each.media_hash for each in self._entries.values() if each.is_findable and self._config.is_shared)

    def check_invariants(self) -> None:
        in_budget = {key: entry for key, entry in self._entries.items() if not entry.is_oversized}
        assert self.num_bytes == sum(entry.num_bytes for entry in in_budget.values())
        assert self.num_bytes <= self._config.max_bytes
        assert len(self._entries) - len(in_budget) <= 1
        idle = {key: entry for key, entry in self._entries.items() if entry.is_ready and not entry.users}
        assert set(self._idle) == idle.keys()
        assert self._num_idle_bytes == sum(entry.num_bytes for entry in idle.values())
        assert all(entry.is_findable and not entry.is_oversized for entry in idle.values())
        assert self._config.is_shared or not self._idle
        self._idle.check_invariants()
