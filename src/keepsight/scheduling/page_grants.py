"""Grants pages to sequences: some ahead while most are free, and by preempting others when none are.

Pages are taken back in the reverse of the order in which they are granted, from the last sequence first. Knows nothing
of steps or of their budgets.
"""

import itertools

from keepsight.scheduling.known_prompt import give_back
from keepsight.scheduling.kv_cache_manager import NO_HIT, KvCacheManager, PrefixHit
from keepsight.scheduling.lineup import Lineup, last_of
from keepsight.scheduling.media_claims import MediaClaims
from keepsight.scheduling.request_state import FOR_MEDIA, RequestState, Status

# Pages for this many tokens of an answer are taken at once while most are free: contiguous pages are read in place.
TOKENS_AHEAD = 128
MAX_USAGE_TO_TAKE_AHEAD = 0.5


class PageGrants:
    def __init__(self, kv_cache: KvCacheManager, media: MediaClaims, lineup: Lineup) -> None:
        self._kv_cache, self._media, self._lineup = kv_cache, media, lineup
        self.num_preemptions = 0

    def try_extend(
        self, state: RequestState, end: int, hit: PrefixHit = NO_HIT, *, may_preempt: bool = True
    ) -> tuple[int, ...] | None:
        """Give the sequence pages for all positions before `end`. Return the added ids; None if too few can be had."""
        if end == state.num_tokens and self._kv_cache.usage < MAX_USAGE_TO_TAKE_AHEAD:
            ahead = min(end + TOKENS_AHEAD, state.max_length - 1)  # the last token is never computed
            if (added := self._kv_cache.try_extend(state.sequence_id, ahead, hit)) is not None:
                return added
        while (added := self._kv_cache.try_extend(state.sequence_id, end, hit)) is None:
            if not may_preempt or not self._take_from_another(state):
                return None
        return added

    def preempt(self, state: RequestState) -> None:
        """Take back a sequence's pages and embeddings; it finds again those that no other sequence takes."""
        give_back(state, self._kv_cache)
        self._media.drop(state)
        state.begin_again()
        self.num_preemptions += 1
        if state.status is Status.RUNNING:
            self._lineup.unseat(state)

    def _take_from_another(self, state: RequestState) -> bool:
        if (victim := self._last_holder_behind(state)) is not None:
            self.preempt(victim)
        elif (victim := self._last_holder_short_of_media()) is not None:
            # It stays parked and keeps its embeddings: what it waits for needs no pages.
            give_back(victim, self._kv_cache)
            victim.give_way()
            self.num_preemptions += 1
        return victim is not None

    def _last_holder_behind(self, state: RequestState) -> RequestState | None:
        """Find the last holder of pages behind this sequence; a waiting one may not take from running ones."""
        runs = state.status is Status.RUNNING
        others = itertools.chain(self._lineup.unseated(), self._lineup.running if runs else ())
        behind = (each for each in others if each.order > state.order and not each.is_under_way)
        return last_of(each for each in behind if self._kv_cache.num_blocks_of(each.sequence_id))

    def _last_holder_short_of_media(self) -> RequestState | None:
        """Find the last holder of pages that is parked for media, wherever it is in the order.

        One that gave way before must get further before it does so again.
        """
        short_of_media = (each for each in self._lineup.parked if each.parked_for in FOR_MEDIA)
        further = (each for each in short_of_media if each.num_computed > each.gave_way_at)
        return last_of(each for each in further if self._kv_cache.num_blocks_of(each.sequence_id))
