"""Decides which sequences wait for a prefix that another sequence computes, and for how long."""

from collections.abc import Mapping

from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.lineup import Lineup
from keepsight.scheduling.milestones import expect_state
from keepsight.scheduling.request_state import ParkedFor, RequestState
from keepsight.scheduling.step_draft import StepDraft
from keepsight.scheduling.step_plan import SequenceId


def waits_for_more(
    state: RequestState,
    hit: PrefixHit,
    draft: StepDraft,
    states: Mapping[SequenceId, RequestState],
    kv_cache: KvCacheManager,
) -> bool:
    """Return whether to wait for what others compute now: with recurrent layers, for a state."""
    if not hit.num_coming or draft.joins_sooner(state, hit.num_tokens):
        return False
    return not kv_cache.keeps_states or expect_state(state, hit, states, kv_cache, draft.config)


def wake_followers(lineup: Lineup, draft: StepDraft, kv_cache: KvCacheManager) -> None:
    """Unpark the sequences that wait for a prefix, now that running ones have announced what they compute next.

    Not those that would wait again: each slice of a long prompt would wake all of its followers, to look through all of
    its blocks.
    """

    def waits_on(state: RequestState) -> bool:
        start = kv_cache.find_coming(state.hasher.hashes, state.num_tokens)
        return start is not None and not draft.joins_sooner(state, start)

    parked = lineup.parked_for(ParkedFor.PREFIX)
    lineup.unpark_these([state for state in parked if not waits_on(state)], ParkedFor.PREFIX)
