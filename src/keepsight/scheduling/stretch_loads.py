"""Which beginnings of prompts are being fetched from where they outlive the device's memory: plain values.

A *stretch* is a row of whole blocks of one prompt, kept as one.  A request asks once, as it arrives, for those behind
what is held of it, and waits for the answer; what comes lies in blocks like any other's then, and is found like them.
Knows nothing of tiers, bytes or clocks.  Invariant: a load has one answer, and ends for all who wait for it at once.
"""

from typing import NamedTuple

from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.request_state import RequestState, Status
from keepsight.scheduling.step_plan import PageFill


class StretchLoad(NamedTuple):
    """A row of stretches that is wanted, from the front as many as there are."""

    # Which of its prompt the first one is.
    first: int
    # What each is kept by: the hash of its last block.
    hashes: tuple[bytes, ...]


class StretchLoads:
    def __init__(self, kv_cache: KvCacheManager, blocks_per_stretch: int) -> None:
        """Where nothing outlives the device's memory a stretch has 0 blocks."""
        self._kv_cache, self.num_blocks_each = kv_cache, blocks_per_stretch
        self._waiting: dict[StretchLoad, list[RequestState]] = {}
        # Not handed out yet.
        self._wanted: list[StretchLoad] = []
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
        taken, self._wanted = self._wanted, []
        return taken

    def take_in(self, load: StretchLoad, places: range) -> None:
        """These of its stretches have come: those whose blocks are not held yet are given some, while there are any."""
        per, hasher = self.num_blocks_each, self._waiting[load][0].hasher
        first_block = (load.first + places.start) * per
        blocks = range(first_block, (load.first + places.stop) * per)
        for block_id, block in self._kv_cache.adopt(map(hasher.name_of, blocks), first_block):
            stretch, place = divmod(block - load.first * per, per)
            self._fills.append(PageFill(block_id, load.hashes[stretch], place))

    def end(self, load: StretchLoad) -> list[RequestState]:
        """Those who waited, but for who has left."""
        return [state for state in self._waiting.pop(load) if state.status is not Status.FINISHED]

    def take_fills(self) -> list[PageFill]:
        taken, self._fills = self._fills, []
        return taken
