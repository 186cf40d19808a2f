"""Tracks the slots of recurrent states: which belong to sequences, and which hold a state kept for others.

A recurrent state is all that a model's recurrent layers know of the positions before it; it cannot be cut back. A slot
is *live* (the state of a sequence that holds pages), *promised* (a slice under way writes to it its state at the end of
a block), *kept* (found by that block's hash) or *free*. Knows nothing of blocks. Invariant: a slot is in exactly one
of the four states, and copies are made in the order in which they were planned and before anything is computed, so a
slot may be given back and taken again before any of them is made.

Some slots are reserved for states that are promised or kept: if sequences could have all, many that begin alike would
evict the state that they begin with.
"""

from collections.abc import Sequence

from keepsight.scheduling.eviction_order import EvictionOrder
from keepsight.scheduling.step_plan import SequenceId, StateCopy


class StateSlots:
    def __init__(self, num_slots: int, num_reserved: int = 0) -> None:
        """Initialize; `num_slots` is 0 if the model has no recurrent layers."""
        self.num_slots = num_slots
        self._most_live = num_slots - num_reserved
        self.num_evicted = 0
        self._live: dict[SequenceId, int] = {}
        self._promised: dict[SequenceId, dict[bytes, int]] = {}
        self._kept: dict[bytes, int] = {}
        # All kept states, the least recently kept or used first.
        self._order: EvictionOrder[bytes] = EvictionOrder(num_slots)
        self._free = list(range(num_slots))
        self._copies: list[StateCopy] = []

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def slot_of(self, sequence_id: SequenceId) -> int | None:
        return self._live.get(sequence_id)

    def count_usable(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks up to the last one whose state is kept."""
        return next((end for end in range(len(hashes), 0, -1) if hashes[end - 1] in self._kept), 0)

    def try_begin(self, sequence_id: SequenceId, block_hash: bytes | None) -> bool:
        """Give a sequence a slot: with the state kept under this name, or for one without any positions yet."""
        assert sequence_id not in self._live, sequence_id
        if len(self._live) == self._most_live:
            return False
        kept = None
        if block_hash is not None:
            kept = self._kept[block_hash]
            self._use(block_hash)
        slot = self._try_take()
        if slot is None:
            return False
        self._live[sequence_id] = slot
        # If no other could be evicted for it, it has taken over the kept one.
        if kept is not None and kept != slot:
            self._copies.append(StateCopy(kept, slot))
        return True

    def promise(self, sequence_id: SequenceId, block_hash: bytes, num_left: int = 0) -> int | None:
        """Return a slot for a state that the sequence will have; None if it is kept already, or no slot can be had.

        `num_left`: slots to be left for sequences that may begin, as a promised one cannot be evicted for them.
        """
        if block_hash in self._kept:
            self._use(block_hash)
            return None
        num_left = min(num_left, self._most_live - len(self._live))
        if len(self._free) + len(self._kept) <= num_left or not (self._free or self._may_evict_for_promise):
            return None
        slot = self._try_take()
        assert slot is not None
        self._promised.setdefault(sequence_id, {})[block_hash] = slot
        return slot

    @property
    def _may_evict_for_promise(self) -> bool:
        """Promises take half of the kept states' slots, rounded up: not also that of the one with which all began."""
        return len(self._kept) > sum(map(len, self._promised.values()))

    def will_have(self, sequence_id: SequenceId, block_hash: bytes) -> bool:
        """Return whether a state is kept under this name, or will be once the sequence's slice under way has ended."""
        return block_hash in self._kept or block_hash in self._promised.get(sequence_id, ())

    def keep(self, sequence_id: SequenceId, block_hash: bytes) -> None:
        """Keep a state that was promised, unless another sequence was first."""
        if block_hash in self._kept:
            self._use(block_hash)
            self.drop_promise(sequence_id, block_hash)
        elif (slot := self._promised.get(sequence_id, {}).pop(block_hash, None)) is not None:
            self._kept[block_hash] = slot
            self._order.add(block_hash)

    def _use(self, block_hash: bytes) -> None:
        self._order.remove(block_hash)
        self._order.add(block_hash)

    def _try_take(self) -> int | None:
        """Take a free slot, or that of the first kept state in eviction order."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        evicted = self._order.first()
        self._order.forget(evicted)
        self.num_evicted += 1
        return self._kept.pop(evicted)

    def drop_promise(self, sequence_id: SequenceId, block_hash: bytes) -> None:
        """Take back the slot of a state that nobody may find."""
        slot = self._promised.get(sequence_id, {}).pop(block_hash, None)
        self._free += () if slot is None else (slot,)

    def release(self, sequence_id: SequenceId) -> None:
        """Take back a sequence's slots, if it has any."""
        slot = self._live.pop(sequence_id, None)
        if slot is not None:
            self._free.append(slot)
        self._free += self._promised.pop(sequence_id, {}).values()

    def pin(self, block_hash: bytes, until: float) -> None:
        """Pin the state kept under this name, if there is one and not too many are pinned already."""
        if block_hash in self._kept:
            self._order.pin(block_hash, until, size=1)

    def end_pins(self, now: float) -> None:
        self._order.end_pins(now)

    def forget(self) -> None:
        """Drop all kept states."""
        self._free += self._kept.values()
        self._kept.clear()
        self._order.clear()

    def take_copies(self) -> list[StateCopy]:
        """Return the copies planned since the last call, in order."""
        taken, self._copies = self._copies, []
        return taken

    def check_invariants(self) -> None:
        promised = [slot for slots in self._promised.values() for slot in slots.values()]
        together = sorted([*self._live.values(), *promised, *self._kept.values(), *self._free])
        assert together == list(range(self.num_slots)), "a slot is in two places or in none"
        assert sorted(self._order) == sorted(self._kept)
        self._order.check_invariants()
