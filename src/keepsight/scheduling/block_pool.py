"""Tracks which blocks of the KV store are in use, idle or free, and which can be found by name.

A block is *in use* (it has users), *idle* (no users, but it can be found until it is evicted) or *free* (nothing in it
can be found). Knows nothing of sequences or of what a name means. Invariant: a block is in exactly one of the three
states, a name belongs to at most one block, and `holdings` counts the media of each findable block.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from keepsight.scheduling.block_beginnings import Alike, BlockBeginnings
from keepsight.scheduling.block_hash import BlockName
from keepsight.scheduling.eviction_order import EvictionOrder
from keepsight.scheduling.holdings import Holdings


class BlockPool:
    def __init__(self, num_blocks: int, holdings: Holdings) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._holdings = holdings
        self._num_users = [0] * num_blocks
        self._name_of: list[BlockName | None] = [None] * num_blocks
        # The findable blocks: by hash, and by the tokens that they begin with.
        self._block_of: dict[bytes, int] = {}
        self._beginnings = BlockBeginnings()
        # A heap, so that neighbors are taken together: contiguous blocks can be read without copying.
        self._free = list(range(num_blocks))
        self._idle: EvictionOrder[int] = EvictionOrder(num_blocks)

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken, with or without eviction."""
        return len(self._free) + len(self._idle)

    @property
    def num_findable(self) -> int:
        return len(self._block_of)

    @property
    def num_pinned(self) -> int:
        return self._idle.size_of_pinned

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of.get(block_hash)

    def find_alike(self, name: BlockName) -> Alike | None:
        """Find the block with the same parent that shares the most leading tokens."""
        return self._beginnings.find(name)

    def name_of(self, block_id: int) -> BlockName | None:
        """Return the block's name; None if it cannot be found, or another is found in its place."""
        return self._name_of[block_id]

    def num_users(self, block_id: int) -> int:
        return self._num_users[block_id]

    def is_in_use(self, block_id: int) -> bool:
        return self._num_users[block_id] > 0

    def use(self, block_id: int) -> None:
        """Add a user to a block that was found."""
        assert self._name_of[block_id] is not None, f"block {block_id} was evicted since it was found"
        if not self._num_users[block_id]:
            self._idle.remove(block_id)
        self._num_users[block_id] += 1

    def try_take(self, num_blocks: int) -> list[int] | None:
        """Take blocks, each with one user: free ones first, then idle ones in eviction order. All or none."""
        if num_blocks > self.num_free:
            return None
        num_evictions = max(0, num_blocks - len(self._free))
        taken = [heappop(self._free) for _ in range(num_blocks - num_evictions)]
        taken += [self._evict_first() for _ in range(num_evictions)]
        for block_id in taken:
            self._num_users[block_id] = 1
        return sorted(taken)

    def _evict_first(self) -> int:
        block_id = self._idle.first()
        self._idle.forget(block_id)
        self._take_name(block_id)
        self.num_evicted += 1
        return block_id

    def _take_name(self, block_id: int) -> None:
        name = self._name_of[block_id]
        assert name is not None, block_id
        del self._block_of[name.block_hash]
        self._beginnings.remove(name, block_id)
        self._name_of[block_id] = None
        for media_hash in name.media:
            self._holdings.remove(media_hash)

    def publish(self, block_id: int, name: BlockName) -> None:
        """Make a block findable, unless another block with the same content already is.

        A block that gets more tokens is published again, by its new name.
        """
        assert self.is_in_use(block_id), block_id
        if self._name_of[block_id] is not None:
            self._take_name(block_id)
        if name.block_hash in self._block_of:
            return
        self._block_of[name.block_hash] = block_id
        self._beginnings.add(name, block_id)
        self._name_of[block_id] = name
        for media_hash in name.media:
            self._holdings.add(media_hash)

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one user from each block; blocks left without users are evicted in this order."""
        for block_id in block_ids:
            assert self.is_in_use(block_id), block_id
            self._num_users[block_id] -= 1
            if self._num_users[block_id]:
                continue
            if self._name_of[block_id] is None:
                heappush(self._free, block_id)
            else:
                self._idle.add(block_id)

    def pin(self, block_id: int, until: float) -> bool:
        """Pin a block, so that unpinned ones are evicted before it. Return False if too many are pinned already."""
        assert self._name_of[block_id] is not None, block_id
        return self._idle.pin(block_id, until, size=1)

    def pinned_until(self, block_id: int) -> float | None:
        return self._idle.pinned_until(block_id)

    def end_pins(self, now: float) -> None:
        self._idle.end_pins(now)

    def forget_names(self) -> None:
        """Make all blocks unfindable; those in use stay in use."""
        if not self._block_of:
            return  # the rest looks at every block, which frequent resets should not pay for
        for media_hash in self.held_media():
            self._holdings.remove(media_hash)
        self._block_of.clear()
        self._beginnings.clear()
        self._name_of = [None] * self.num_blocks
        self._free += self._idle
        self._idle.clear()
        heapify(self._free)

    def held_media(self) -> Iterator[str]:
        """Yield the media hashes of findable blocks, once for each block."""
        return chain.from_iterable(name.media for name in self._name_of if name is not None)

    def check_invariants(self) -> None:
        in_use = {block_id for block_id, num_users in enumerate(self._num_users) if num_users}
        assert min(self._num_users) >= 0
        together = sorted([*in_use, *self._idle, *self._free])
        assert together == list(range(self.num_blocks)), "a block is in two places or in none"
        named = {block_id: name for block_id, name in enumerate(self._name_of) if name is not None}
        assert {name.block_hash: block_id for block_id, name in named.items()} == self._block_of
        assert len(named) == len(self._block_of) == len(self._beginnings)
        for block_id, name in named.items():
            alike = self.find_alike(name)
            assert alike is not None, block_id
            assert alike.block_id == block_id, "found by another's beginning, not by its own"
        assert named.keys() >= set(self._idle)
        self._idle.check_invariants()
        self._beginnings.check_invariants()
        assert named.keys().isdisjoint(self._free)
