"""Which beginnings of prompts are being fetched from where they outlive the device's memory: plain values.

A *stretch* is a row of whole blocks of one prompt, kept as one.  A request asks once, as it arrives, for those behind
what is held of it, and waits for the answer; what comes lies in blocks like any other's then, and is found like them.
Knows nothing of tiers, bytes or clocks.  Invariant: a load has one answer, and ends for all who wait for it at once.
"""

from typing import NamedTuple

from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.lineup import Lineup, last_of
from keepsight.scheduling.request_state import RequestState, Status
from keepsight.scheduling.step_plan import PageFill


class StretchLoad(NamedTuple):
    """A row of stretches that is wanted, from the front as many as there are."""

    # Which of its prompt the first one is.
    first: int
    # What each is kept by: the hash of its last block.
    hashes: tuple[bytes, ...]


class StretchLoads:
    def __init__(self, kv_cache: KvCacheManager, lineup: Lineup, blocks_per_stretch: int) -> None:
        """Where nothing outlives the device's memory a stretch has 0 blocks."""
        self._kv_cache, self._lineup, self.num_blocks_each = kv_cache, lineup, blocks_per_stretch
        self._waiting: dict[StretchLoad, list[RequestState]] = {}
        # Not handed out yet; handed out; and those that have come, until nobody waits for a seat with them.
        self._wanted: list[StretchLoad] = []
        self._under_way: list[StretchLoad] = []
        self._came: list[tuple[StretchLoad, list[RequestState]]] = []
        self._fills: list[PageFill] = []

    @property
    def num_tokens_each(self) -> int:
        return self.num_blocks_each * self._kv_cache.block_size

    def ask(self, state: RequestState, hit: PrefixHit) -> bool:
        """Whether it is to wait for what may be found elsewhere; no cache helps who wants to be told of its prompt."""
        if not self.num_blocks_each or state.tells_prompt or hit.is_being_computed:
            return False
        load = self._load_behind(state, len(hit.block_ids))
        if not load.hashes:
            return False
        if load not in self._waiting:
            self._wanted.append(load)
        self._waiting.setdefault(load, []).append(state)
        return True

    def _load_behind(self, state: RequestState, num_held: int) -> StretchLoad:
        """One token is always computed."""
        per, most = self.num_blocks_each, (state.num_tokens - 1) // self._kv_cache.block_size
        first = num_held // per
        ends = range((first + 1) * per, most + 1, per)
        return StretchLoad(first, tuple(state.hasher.hashes[end - 1] for end in ends))

    def take_wanted(self) -> list[StretchLoad]:
        """As far as there is room: what came for others, who wait for seats, is not to go for it."""
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
        """Room may be long in coming: who could take others' pages, or all that are left, computes it instead."""
        before, pool = [*self._under_way, *(come[0] for come in self._came)], self._kv_cache.pool
        num_blocks = sum(len(each.hashes) for each in (*before, load)) * self.num_blocks_each
        if num_blocks <= min(pool.num_free, pool.num_blocks // 2 if before else pool.num_blocks):
            return True
        last = last_of(self._lineup.running)
        return not before and (last is None or self._waiting[load][0].order < last.order)

    def take_in(self, load: StretchLoad, places: range) -> None:
        """These of its stretches have come: those whose blocks are not held yet are given some, while there are any."""
        per, hasher = self.num_blocks_each, self._waiting[load][0].hasher
        first_block = (load.first + places.start) * per
        blocks = range(first_block, (load.first + places.stop) * per)
        for block_id, block in self._kv_cache.adopt(map(hasher.name_of, blocks), first_block):
            stretch, place = divmod(block - load.first * per, per)
            self._fills.append(PageFill(block_id, load.hashes[stretch], place))

    def end(self, load: StretchLoad, num_loaded: int) -> list[RequestState]:
        """Those who waited, but for who has left; so many stretches have come."""
        states = [state for state in self._waiting.pop(load) if state.status is not Status.FINISHED]
        for state in states:
            state.num_loaded_tokens = num_loaded * self.num_tokens_each
        self._under_way.remove(load)
        self._came.append((load, states))
        return states

    def take_fills(self) -> list[PageFill]:
        taken, self._fills = self._fills, []
        return taken
