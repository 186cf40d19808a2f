"""Which blocks each sequence holds, and which prefix of a new one is already computed.

Decides by block ids and names alone: knows nothing of tensors, and nothing of what a name is made of.  Its invariant:
a block can be found only once its keys and values are computed, and a refused request changes nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keepsight.engine_config import KvCacheConfig
from keepsight.scheduling.block_hash import BlockName
from keepsight.scheduling.block_pool import BlockPool
from keepsight.scheduling.holdings import Holdings
from keepsight.scheduling.prompt_ends import PromptEnds
from keepsight.scheduling.step_plan import EndName, KeptStretch, SequenceId


class PrefixHit(NamedTuple):
    """What was found of a sequence's beginning.  Good until blocks are next taken: use it at once or look again."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0
    # Whether another sequence is computing the next block right now: cheaper to wait for than to compute again.
    is_being_computed: bool = False
    # Another block that begins as the next one does: so much of it is to be copied, and counts as found.
    alike: int | None = None


NO_HIT = PrefixHit()


@dataclass(slots=True)
class _Table:
    # False: its blocks stay its own, because nothing is shared or because it began before the prefixes were forgotten.
    may_publish: bool
    block_ids: list[int] = field(default_factory=list)
    # Its leading blocks that were found or published.
    num_published: int = 0
    # Hashes of the blocks that its slice under way will fill.
    announced: Sequence[bytes] = ()


class KvCacheManager:
    def __init__(self, config: KvCacheConfig, holdings: Holdings) -> None:
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        # Of these, those that did not lie on the device before.
        self.num_loaded_hit_tokens = 0
        self.block_size = config.block_size
        self.is_caching = config.enable_prefix_caching
        self.ends = PromptEnds(config.max_prompt_ends)
        # Read by whoever counts, changed here alone.
        self.pool = BlockPool(config.num_blocks, holdings)
        self._tables: dict[SequenceId, _Table] = {}
        # By how many slices under way.
        self._announced: Counter[bytes] = Counter()
        self._has_awaited_changed = False
        self._blocks_per_stretch = config.blocks_per_stretch
        # Published since this was last taken.
        self._to_keep: list[KeptStretch] = []

    @property
    def usage(self) -> float:
        """The share of all blocks that sequences hold, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def num_blocks_of(self, sequence_id: SequenceId) -> int:
        table = self._tables.get(sequence_id)
        return 0 if table is None else len(table.block_ids)

    # What can be found ----------------------------------------------------------------------------------------

    def find_prefix(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """The longest computed row of blocks with which a sequence of `num_tokens` begins; one token is always left."""
        assert num_tokens > 0
        block_ids: list[int] = []
        is_being_computed = False
        for block_hash in hashes[: (num_tokens - 1) // self.block_size]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                is_being_computed = block_hash in self._announced
                break
            block_ids.append(block_id)
        return PrefixHit(tuple(block_ids), len(block_ids) * self.block_size, is_being_computed)

    def reach_further(self, hit: PrefixHit, next_name: BlockName, num_tokens: int) -> PrefixHit:
        """What was found, and with it the tokens of the next block that another has, too; one is always left."""
        alike = self.pool.find_alike(next_name)
        if alike is None or hit.num_tokens + 1 == num_tokens:
            return hit
        return hit._replace(num_tokens=min(hit.num_tokens + alike.num_tokens, num_tokens - 1), alike=alike.block_id)

    def find_end(self, hit: PrefixHit, num_tokens: int, end_hash: bytes) -> EndName | None:
        """What the end of a prompt is kept as, if all of the prompt was hit that can be."""
        is_whole = len(hit.block_ids) == (num_tokens - 1) // self.block_size
        return self.ends.find(end_hash) if is_whole else None

    def name_end(self, sequence_id: SequenceId, end_hash: bytes) -> EndName | None:
        """What the end of this sequence's prompt is to be kept as, if others may find it."""
        return self.ends.name(end_hash) if self._tables[sequence_id].may_publish else None

    def count(self, hit: PrefixHit, num_tokens: int, num_loaded: int = 0) -> None:
        """For the statistics: a sequence of `num_tokens` was admitted with this hit, for which so many were loaded."""
        if self.is_caching:
            self.num_queried_tokens += num_tokens
            self.num_hit_tokens += hit.num_tokens
            self.num_loaded_hit_tokens += min(num_loaded, hit.num_tokens)

    def announce(self, sequence_id: SequenceId, hashes: Sequence[bytes], end: int) -> None:
        """A slice up to position `end` is under way: the blocks that it fills can soon be found."""
        table = self._tables[sequence_id]
        assert not table.announced, f"{sequence_id} has a slice under way"
        table.announced = tuple(hashes[index] for index in self._newly_full(table, end))
        self._announced.update(table.announced)

    def publish(self, sequence_id: SequenceId, name_of: Callable[[int, int], BlockName], end: int) -> None:
        """It is computed up to `end`: from now on its full blocks can be found, and what is behind them be copied.

        `name_of` is told which block, and how many tokens of it.
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
        if num_behind and table.may_publish:
            self._publish_behind(table, name_of(table.num_published, num_behind), num_behind)

    def _note_stretch(self, table: _Table, last: BlockName) -> None:
        end, num_blocks = table.num_published, self._blocks_per_stretch
        if num_blocks and end % num_blocks == 0:
            self._to_keep.append(KeptStretch(last.block_hash, tuple(table.block_ids[end - num_blocks : end])))

    def _stretches_before(self, table: _Table) -> tuple[bytes, ...]:
        """The last that is whole."""
        num_blocks = self._blocks_per_stretch
        ends = range(num_blocks, table.num_published // num_blocks * num_blocks, num_blocks)
        names = [self.pool.name_of(table.block_ids[end - 1]) for end in ends]
        return tuple(name.block_hash for name in names if name is not None)

    def _publish_behind(self, table: _Table, name: BlockName, num_tokens: int) -> None:
        """Unless another block has as much."""
        alike = self.pool.find_alike(name)
        if alike is None or alike.num_tokens < num_tokens:
            self.pool.publish(table.block_ids[table.num_published], name)

    def _newly_full(self, table: _Table, end: int) -> range:
        """The blocks that what is computed up to `end` fills, and that others may find then."""
        num_full = end // self.block_size if table.may_publish else 0
        assert num_full <= len(table.block_ids), end
        return range(table.num_published, num_full)

    def take_to_keep(self) -> list[KeptStretch]:
        """Stretches whose blocks can be found now: good until anything is written to them again."""
        taken, self._to_keep = self._to_keep, []
        return taken

    def adopt(self, names: Iterable[BlockName], first: int) -> list[tuple[int, int]]:
        """Blocks for those of a row, from its `first` on, that are not held: each, and which of the row it is.

        They can be found from now on, so they are to be filled before anything else.  They evict idle ones, as if they
        had been computed; behind one for which there is no room nobody would find any.
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
        """What it announced will not come."""
        table = self._tables.get(sequence_id)
        if table is None or not table.announced:
            return
        for block_hash in table.announced:
            self._announced[block_hash] -= 1
            if not self._announced[block_hash]:
                del self._announced[block_hash]
        table.announced = ()
        self._has_awaited_changed = True

    def take_awaited_change(self) -> bool:
        """Whether any block that others may wait for has come since this was last asked, or will not come."""
        has_changed, self._has_awaited_changed = self._has_awaited_changed, False
        return has_changed

    def pin_prefix(self, hashes: Sequence[bytes], num_tokens: int, until: float) -> None:
        """The blocks that these tokens fill go after all that are not pinned, from the front as many as can be."""
        for block_hash in hashes[: num_tokens // self.block_size]:
            block_id = self.pool.find(block_hash)
            if block_id is None or not self.pool.pin(block_id, until):
                return

    def end_pins(self, now: float) -> None:
        self.pool.end_pins(now)

    def forget_prefixes(self) -> None:
        """Nothing computed so far is found again; sequences keep their blocks, and keep them for themselves."""
        self.pool.forget_names()
        self.ends.forget()
        self._announced.clear()
        self._to_keep.clear()
        self._has_awaited_changed = True
        for table in self._tables.values():
            table.may_publish = False
            table.announced = ()

    # Who holds what -------------------------------------------------------------------------------------------

    def try_extend(self, sequence_id: SequenceId, num_tokens: int, hit: PrefixHit = NO_HIT) -> tuple[int, ...] | None:
        """Makes its table cover `num_tokens` positions; the block ids that were added, or None and nothing changed."""
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
        # Idle blocks of the hit leave the ones that can be taken, too.
        num_idle = sum(not self.pool.is_in_use(block_id) for block_id in hit.block_ids)
        if num_idle + num_fresh > self.pool.num_free:
            return None
        for block_id in hit.block_ids:
            self.pool.use(block_id)
        fresh = self.pool.try_take(num_fresh)
        assert fresh is not None
        block_ids = [*hit.block_ids, *fresh]
        self._tables[sequence_id] = _Table(self.is_caching, block_ids, num_published=len(hit.block_ids))
        return tuple(block_ids)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def release(self, sequence_id: SequenceId) -> None:
        """Gives back all blocks that it has.  The last are evicted first: without them the others still serve."""
        self.withdraw(sequence_id)
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self.pool.release(reversed(table.block_ids))

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        self.ends.check_invariants()
        num_users = Counter(block_id for table in self._tables.values() for block_id in table.block_ids)
        for block_id in range(self.pool.num_blocks):
            assert self.pool.num_users(block_id) == num_users[block_id], block_id
        assert Counter(found for table in self._tables.values() for found in table.announced) == self._announced
        for sequence_id, table in self._tables.items():
            assert len(set(table.block_ids)) == len(table.block_ids), sequence_id
            assert table.num_published <= len(table.block_ids), sequence_id
            assert table.may_publish or not table.announced, sequence_id
