"""Tracks which blocks each sequence holds and which prefix of a new sequence is already computed.

Works on block ids and names alone: knows nothing of tensors or of how names are built. If the model has recurrent
layers, a sequence that holds blocks also holds the slot of a state, and a prefix is found up to a kept state.
Invariant: a block can be found only once its keys and values are computed, and a refused call changes nothing.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from keepsight.engine_config import KvCacheConfig, count_reserved_slots
from keepsight.scheduling.block_hash import BlockName
from keepsight.scheduling.block_pool import BlockPool
from keepsight.scheduling.holdings import Holdings
from keepsight.scheduling.prompt_ends import PromptEnds
from keepsight.scheduling.state_slots import StateSlots
from keepsight.scheduling.step_plan import EndName, KeptStretch, SequenceId


class PrefixHit(NamedTuple):
    """The cached prefix found for a sequence. Valid until blocks are next taken: use it at once or look again."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    # How much will be found soon, as another sequence is computing it right now: waiting is cheaper than computing it
    # again. 0: no more than is found now. With recurrent layers, only up to where that sequence keeps its state.
    num_coming: int = 0
    # A block that begins like the next one. The common tokens are to be copied, and `num_tokens` includes them.
    alike: int | None = None
    # If the model has recurrent layers: how far the blocks go that are computed or being computed.
    num_common: int = 0


NO_HIT = PrefixHit()


@dataclass(slots=True)
class _Table:
    # False: its blocks stay private, because nothing is shared or because it began before the prefixes were forgotten.
    may_publish: bool
    block_ids: list[int] = field(default_factory=list)
    # Number of leading blocks that were found or published.
    num_published: int = 0
    # Hashes of the blocks that the slice under way will fill, and where that slice ends.
    announced: Sequence[bytes] = ()
    announced_end: int = 0


class KvCacheManager:
    def __init__(self, config: KvCacheConfig, holdings: Holdings) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        # The part of `num_hit_tokens` that was loaded to the device from a tier.
        self.num_loaded_hit_tokens = 0
        self.block_size = config.block_size
        self.is_caching = config.enable_prefix_caching
        self.ends = PromptEnds(config.max_prompt_ends)
        # Others read it for statistics; only this class changes it.
        self.pool = BlockPool(config.num_blocks, holdings)
        num_reserved = count_reserved_slots(config.num_state_slots, keeps_states=self.is_caching)
        self.slots = StateSlots(config.num_state_slots, num_reserved)
        self._tables: dict[SequenceId, _Table] = {}
        # For each block hash, the sequences whose slices under way will compute it, in the order of their slices.
        self._announced: dict[bytes, dict[SequenceId, None]] = {}
        self._has_awaited_changed = False
        self._blocks_per_stretch = config.blocks_per_stretch
        # Stretches published since this was last taken.
        self._to_keep: list[KeptStretch] = []

    @property
    def usage(self) -> float:
        """The share of all blocks that sequences hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    @property
    def keeps_states(self) -> bool:
        """True if states of recurrent layers are kept for others: without one, no sequence can begin in the middle."""
        return self.is_caching and self.slots.num_slots > 0

    def num_blocks_of(self, sequence_id: SequenceId) -> int:
        table = self._tables.get(sequence_id)
        return 0 if table is None else len(table.block_ids)

    # Prefix cache ---------------------------------------------------------------------------------------------

    def find_prefix(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """Find the longest cached prefix of a sequence of `num_tokens`; at least one token is left to compute."""
        assert num_tokens > 0
        block_ids: list[int] = []
        num_coming, size = 0, self.block_size
        hashes = hashes[: (num_tokens - 1) // size]
        for block_hash in hashes:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                num_coming = (len(block_ids) + 1) * size if block_hash in self._announced else 0
                break
            block_ids.append(block_id)
        if self.slots.num_slots:
            return self._find_state(hashes, block_ids)
        return PrefixHit(tuple(block_ids), len(block_ids) * size, num_coming)

    def find_coming(self, hashes: Sequence[bytes], num_tokens: int) -> int | None:
        """Return where in a sequence the block begins that is not cached but announced; None if there is none.

        Faster than `find_prefix`, and only right where no earlier block is missing. Always None with recurrent layers.
        """
        count = 0 if self.slots.num_slots else (num_tokens - 1) // self.block_size
        index = bisect_left(range(count), True, key=lambda index: self.pool.find(hashes[index]) is None)
        return index * self.block_size if index < count and hashes[index] in self._announced else None

    def _find_state(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> PrefixHit:
        """Cut the found blocks back to the last kept state."""
        num_usable = self.slots.count_usable(hashes[: len(block_ids)])
        num_coming = sum(1 for _ in takewhile(self._announced.__contains__, hashes[len(block_ids) :]))
        num_common = (len(block_ids) + num_coming) * self.block_size
        return PrefixHit(
            tuple(block_ids[:num_usable]),
            num_usable * self.block_size,
            num_coming=num_common if num_coming else 0,
            num_common=num_common,
        )

    def reach_further(self, hit: PrefixHit, next_name: BlockName, num_tokens: int) -> PrefixHit:
        """Extend a hit by the first tokens of the next block if another block begins with them; one is always left.

        Not with recurrent layers, as no state is kept inside a block.
        """
        alike = None if self.slots.num_slots else self.pool.find_alike(next_name)
        if alike is None or hit.num_tokens + 1 == num_tokens:
            return hit
        return hit._replace(num_tokens=min(hit.num_tokens + alike.num_tokens, num_tokens - 1), alike=alike.block_id)

    def name_end(self, sequence_id: SequenceId, end_hash: bytes) -> EndName | None:
        """Return the name under which to keep the end of this sequence's prompt, or None if others may not find it."""
        return self.ends.name(end_hash) if self._tables[sequence_id].may_publish else None

    def count(self, hit: PrefixHit, num_tokens: int, num_loaded: int = 0) -> None:
        """Count, for the statistics, a sequence admitted with this hit, of which at most `num_loaded` were loaded."""
        if self.is_caching:
            self.num_queried_tokens += num_tokens
            self.num_hit_tokens += hit.num_tokens
            self.num_loaded_hit_tokens += min(num_loaded, hit.num_tokens)

    def announce(self, sequence_id: SequenceId, hashes: Sequence[bytes], end: int) -> None:
        """Note that a slice up to position `end` is under way: the blocks that it fills can soon be found."""
        table = self._tables[sequence_id]
        assert not table.announced, f"{sequence_id} has a slice under way"
        table.announced = tuple(hashes[index] for index in self._newly_full(table, end))
        table.announced_end = end
        for block_hash in table.announced:
            self._announced.setdefault(block_hash, {})[sequence_id] = None

    def announced_by(self, hashes: Iterable[bytes]) -> list[tuple[SequenceId, int]]:
        """Return who computes the first announced one of these blocks, and where those slices end."""
        sequence_ids = next((self._announced[each] for each in hashes if each in self._announced), {})
        return [(each, self._tables[each].announced_end) for each in sequence_ids]

    def publish(self, sequence_id: SequenceId, name_of: Callable[[int, int], BlockName], end: int) -> None:
        """Make the full blocks up to `end` findable, and the partly filled one behind them available for copying.

        `name_of` takes the index of a block and the number of its tokens.
        """
        self.withdraw(sequence_id)
        table, num_kept = self._tables[sequence_id], len(self._to_keep)
        for index in self._newly_full(table, end):
            name = name_of(index, self.block_size)
            self.pool.publish(table.block_ids[index], name)
            table.num_published = index + 1
            self._note_stretch(table, name)
        if len(self._to_keep) > num_kept:
            self._to_keep[-1] = self._to_keep[-1]._replace(behind=self._stretches_before(table))
        num_behind = end % self.block_size
        if num_behind and table.may_publish and not self.slots.num_slots:
            self._publish_behind(table, name_of(table.num_published, num_behind), num_behind)

    def _note_stretch(self, table: _Table, last: BlockName) -> None:
        end, num_blocks = table.num_published, self._blocks_per_stretch
        if num_blocks and end % num_blocks == 0:
            self._to_keep.append(KeptStretch(last.block_hash, tuple(table.block_ids[end - num_blocks : end])))

    def _stretches_before(self, table: _Table) -> tuple[bytes, ...]:
        """Return the hashes of all whole stretches of the table before the last one."""
        num_blocks = self._blocks_per_stretch
        ends = range(num_blocks, table.num_published // num_blocks * num_blocks, num_blocks)
        names = [self.pool.name_of(table.block_ids[end - 1]) for end in ends]
        return tuple(name.block_hash for name in names if name is not None)

    def _publish_behind(self, table: _Table, name: BlockName, num_tokens: int) -> None:
        """Publish the partly filled block, unless another block has as many of its tokens."""
        alike = self.pool.find_alike(name)
        if alike is None or alike.num_tokens < num_tokens:
            self.pool.publish(table.block_ids[table.num_published], name)

    def promise_state(self, sequence_id: SequenceId, block_hash: bytes, num_left: int = 0) -> int | None:
        """Return the slot to which the state after a block is written, if others may find it and a slot can be had.

        `num_left`: slots to be left for sequences that may begin.
        """
        may_publish = self._tables[sequence_id].may_publish
        return self.slots.promise(sequence_id, block_hash, num_left) if may_publish else None

    def keep_state(self, sequence_id: SequenceId, block_hash: bytes) -> None:
        """Keep the promised state after a block, which is published, if others may find it.

        It is pinned if the block is: a pin may have come when the blocks were cached, but no state among them.
        """
        if not self._tables[sequence_id].may_publish:
            self.slots.drop_promise(sequence_id, block_hash)
            return
        self.slots.keep(sequence_id, block_hash)
        block_id = self.pool.find(block_hash)
        assert block_id is not None, "the state was kept before its block"
        if (until := self.pool.pinned_until(block_id)) is not None:
            self.slots.pin(block_hash, until)

    def _newly_full(self, table: _Table, end: int) -> range:
        """Return the indices of unpublished blocks that are full once positions up to `end` are computed."""
        num_full = end // self.block_size if table.may_publish else 0
        assert num_full <= len(table.block_ids), end
        return range(table.num_published, num_full)

    def take_to_keep(self) -> list[KeptStretch]:
        """Return stretches published since the last call: valid until their blocks are written to again."""
        taken, self._to_keep = self._to_keep, []
        return taken

    def adopt(self, names: Iterable[BlockName], first: int) -> list[tuple[int, int]]:
        """Allocate blocks for the names that are not held, the first being block `first` of its prompt.

        Return (block id, index in the prompt) pairs. The blocks can be found at once, so they must be filled before
        anything else. Idle blocks are evicted for them as for computed ones. Stops at the first for which there is
        no room, as those behind it could not be found.
        """
        held, adopted = [], []
        for index, name in enumerate(names, first):
            block_id = self.pool.find(name.block_hash)
            if block_id is not None:
                self.pool.use(block_id)
            elif (block_id := self._try_adopt(name, is_first=not index)) is not None:
                adopted.append((block_id, index))
            else:
                break
            held.append(block_id)
        self.pool.release(reversed(held))
        return adopted

    def _try_adopt(self, name: BlockName, *, is_first: bool) -> int | None:
        taken = self.pool.try_take(1) if is_first or self.pool.find(name.parent) is not None else None
        if taken is None:
            return None
        self.pool.publish(taken[0], name)
        return taken[0]

    def withdraw(self, sequence_id: SequenceId) -> None:
        """Take back what the sequence announced."""
        table = self._tables.get(sequence_id)
        if table is None or not table.announced:
            return
        for block_hash in table.announced:
            sequence_ids = self._announced[block_hash]
            del sequence_ids[sequence_id]
            if not sequence_ids:
                del self._announced[block_hash]
        table.announced = ()
        self._has_awaited_changed = True

    def take_awaited_change(self) -> bool:
        """Return whether, since the last call, an announced block was published or withdrawn."""
        has_changed, self._has_awaited_changed = self._has_awaited_changed, False
        return has_changed

    def pin_prefix(self, hashes: Sequence[bytes], num_tokens: int, until: float) -> None:
        """Pin the blocks that the first `num_tokens` fill, and kept states, from the front, as many as can be."""
        for block_hash in hashes[: num_tokens // self.block_size]:
            block_id = self.pool.find(block_hash)
            if block_id is None or not self.pool.pin(block_id, until):
                return
            self.slots.pin(block_hash, until)

    def end_pins(self, now: float) -> None:
        self.pool.end_pins(now)
        self.slots.end_pins(now)

    def forget_prefixes(self) -> None:
        """Make everything computed so far unfindable; sequences keep their blocks but do not publish them."""
        self.pool.forget_names()
        self.slots.forget()
        self.ends.forget()
        self._announced.clear()
        self._to_keep.clear()
        self._has_awaited_changed = True
        for table in self._tables.values():
            table.may_publish = False
            table.announced = ()

    # Block tables ---------------------------------------------------------------------------------------------

    def try_extend(self, sequence_id: SequenceId, num_tokens: int, hit: PrefixHit = NO_HIT) -> tuple[int, ...] | None:
        """Make the table cover `num_tokens` positions. Return the added block ids; None, changing nothing, if full.

        With its first blocks a sequence gets the slot of its state, if the model has recurrent layers.
        """
        table = self._tables.get(sequence_id)
        if table is None:
            return self._try_begin(sequence_id, num_tokens, hit)
        assert not hit.block_ids, f"{sequence_id} has blocks already"
        num_missing = self._num_blocks(num_tokens) - len(table.block_ids)
        if num_missing <= 0:
            return ()
        fresh = self.pool.try_take(num_missing)
        if fresh is None:
            return None
        table.block_ids += fresh
        return tuple(fresh)

    def _try_begin(self, sequence_id: SequenceId, num_tokens: int, hit: PrefixHit) -> tuple[int, ...] | None:
        num_fresh = self._num_blocks(num_tokens) - len(hit.block_ids)
        assert num_fresh >= 0, (sequence_id, num_tokens, hit)
        # Idle blocks of the hit count as free until they are used.
        num_idle = sum(not self.pool.is_in_use(block_id) for block_id in hit.block_ids)
        if num_idle + num_fresh > self.pool.num_free:
            return None
        if self.slots.num_slots and not self.slots.try_begin(sequence_id, self._last_hash(hit)):
            return None
        for block_id in hit.block_ids:
            self.pool.use(block_id)
        fresh = self.pool.try_take(num_fresh)
        assert fresh is not None
        block_ids = [*hit.block_ids, *fresh]
        self._tables[sequence_id] = _Table(self.is_caching, block_ids, num_published=len(hit.block_ids))
        return tuple(block_ids)

    def _last_hash(self, hit: PrefixHit) -> bytes | None:
        """Return the hash under which the state after the hit is kept; None if nothing was hit."""
        if not hit.block_ids:
            return None
        name = self.pool.name_of(hit.block_ids[-1])
        assert name is not None, f"block {hit.block_ids[-1]} was evicted since it was found"
        return name.block_hash

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def release(self, sequence_id: SequenceId) -> None:
        """Release all that the sequence holds. Its last blocks are evicted first: the others are useful without."""
        self.withdraw(sequence_id)
        self.slots.release(sequence_id)
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self.pool.release(reversed(table.block_ids))

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.ends.check_invariants()
        self.slots.check_invariants()
        num_users = Counter(block_id for table in self._tables.values() for block_id in table.block_ids)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.num_users(block_id) == num_users[block_id], block_id
        announced: dict[bytes, dict[SequenceId, None]] = {}
        for sequence_id, table in self._tables.items():
            for block_hash in table.announced:
                announced.setdefault(block_hash, {})[sequence_id] = None
        assert announced == self._announced
        for sequence_id, table in self._tables.items():
            assert (self.slots.slot_of(sequence_id) is not None) == (self.slots.num_slots > 0), sequence_id
            assert len(set(table.block_ids)) == len(table.block_ids), sequence_id
            assert table.num_published <= len(table.block_ids), sequence_id
            assert table.may_publish or not table.announced, sequence_id
