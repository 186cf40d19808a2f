"""Tracks which beginnings of prompts are being loaded from tiers: plain values only.

A *stretch* is a row of whole blocks of one prompt, kept as one entry. A request asks once, on arrival, for the
stretches behind its cached prefix, and waits for the answer; what is loaded goes into ordinary blocks and is found like
any other. Knows nothing of tiers, bytes or clocks. Invariant: a load has one answer and ends for all its waiters at
once.
"""

from typing import NamedTuple

from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.lineup import Lineup, last_of
from keepsight.scheduling.request_state import LoadedTokens, RequestState, Status
from keepsight.scheduling.step_plan import PageFill


class StretchLoad(NamedTuple):
    """A row of stretches to load: from the front, as many as the tier has."""

    # The index of the first one among its prompt's stretches.
    first: int
    # The name of each: the hash of its last block.
    hashes: tuple[bytes, ...]


class StretchLoads:
    def __init__(self, kv_cache: KvCacheManager, lineup: Lineup, blocks_per_stretch: int) -> None:
        """Initialize; without tiers for keys and values `blocks_per_stretch` is 0."""
        self._kv_cache, self._lineup, self.num_blocks_each = kv_cache, lineup, blocks_per_stretch
        self._waiting: dict[StretchLoad, list[RequestState]] = {}
        # Loads not handed out yet; handed out; and finished, for as long as a sequence waits for a seat with them.
        self._wanted: list[StretchLoad] = []
        self._under_way: list[StretchLoad] = []
        self._came: list[tuple[StretchLoad, list[RequestState]]] = []
        self._fills: list[PageFill] = []

    @property
    def num_tokens_each(self) -> int:
        return self.num_blocks_each * self._kv_cache.block_size

    def ask(self, state: RequestState, hit: PrefixHit) -> bool:
        """Ask for stretches behind the hit. Return whether the sequence must wait for the answer.

        Nothing is asked for a sequence that reports its prompt's log-probabilities: no cache has them.
        """
        if not self.num_blocks_each or state.wants_prompt_logprobs or hit.num_coming:
            return False
        load = self._load_behind(state, len(hit.block_ids))
        if not load.hashes:
            return False
        if load not in self._waiting:
            self._wanted.append(load)
        self._waiting.setdefault(load, []).append(state)
        return True

    def _load_behind(self, state: RequestState, num_held: int) -> StretchLoad:
        """Return the load of all stretches behind the held blocks; at least one token is left to compute."""
        per, most = self.num_blocks_each, (state.num_tokens - 1) // self._kv_cache.block_size
        first = num_held // per
        ends = range((first + 1) * per, most + 1, per)
        return StretchLoad(first, tuple(state.hasher.hashes[end - 1] for end in ends))

    def take_wanted(self) -> list[StretchLoad]:
        """Return the loads to start, as far as there is room without evicting what came for sequences still in line."""
        self._came = [come for come in self._came if any(state.status is Status.WAITING for state in come[1])]
        taken = list[StretchLoad]()
        for load in sorted(self._wanted, key=lambda load: self._waiting[load][0].order):
            if not self._may_load(load):
                break
            self._under_way.append(load)
            self._wanted.remove(load)
            taken.append(load)
        return taken

    def _may_load(self, load: StretchLoad) -> bool:
        """Return whether there is room for the load, or no use in waiting for room.

        Room may be long in coming. So a sequence that could take pages from running ones, or all that are left, does
        not wait: whatever finds no block is computed instead.
        """
        before, pool = [*self._under_way, *(come[0] for come in self._came)], self._kv_cache.pool
        num_blocks = sum(len(each.hashes) for each in (*before, load)) * self.num_blocks_each
        if num_blocks <= min(pool.num_free, pool.num_blocks // 2 if before else pool.num_blocks):
            return True
        last = last_of(self._lineup.running)
        return not before and (last is None or self._waiting[load][0].order < last.order)

    def take_in(self, load: StretchLoad, places: range) -> None:
        """Allocate blocks, as far as there are any, for arrived stretches whose blocks are not held yet."""
        per, hasher = self.num_blocks_each, self._waiting[load][0].hasher
        first_block = (load.first + places.start) * per
        blocks = range(first_block, (load.first + places.stop) * per)
        for block_id, block in self._kv_cache.adopt(map(hasher.name_of, blocks), first_block):
            stretch, place = divmod(block - load.first * per, per)
            self._fills.append(PageFill(block_id, load.hashes[stretch], place))

    def end(self, load: StretchLoad, num_loaded: int) -> list[RequestState]:
        """End a load that brought `num_loaded` stretches. Return the sequences that waited and are still alive."""
        states = [state for state in self._waiting.pop(load) if state.status is not Status.FINISHED]
        loaded = LoadedTokens(num_loaded * self.num_tokens_each)
        for state in states:
            state.loaded = loaded
        self._under_way.remove(load)
        self._came.append((load, states))
        return states

    def take_fills(self) -> list[PageFill]:
        taken, self._fills = self._fills, []
        return taken
