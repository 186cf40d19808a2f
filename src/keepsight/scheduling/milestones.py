"""Decides where in a prompt the state of a model's recurrent layers is kept, for others and for later turns.

A sequence can only begin where a state was kept: at a *milestone*. A slice that reaches one writes the state there to
another slot.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from keepsight.engine_config import SchedulerConfig
from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.lineup import Lineup
from keepsight.scheduling.request_state import RequestState, Status
from keepsight.scheduling.step_plan import KeptState, SequenceId

# A milestone closer than this many blocks behind the place where the sequence begins spares others too little.
LEAST_BLOCKS_BEHIND = 2


def find_milestones(state: RequestState, hit: PrefixHit, block_size: int) -> tuple[int, ...]:
    """Return the milestones of a sequence that begins with this hit: the last ends of blocks before these positions.

    Before its last token begins the next turn, or the same prompt again; at the end of the last media item, another
    question about it; where its common beginning with others ends, the next prompt with that beginning; and where a
    pin ends, whatever it was set for. A pin on what is cached further already gets no milestone: the next prompt that
    needs it finds its common beginning only, and keeps the state there.
    """
    ends = [state.num_tokens - 1, hit.num_common, *(pin.num_tokens for pin in state.request.pins)]
    ends += [item.span.end for item in state.media[-1:]]
    whole = {end // block_size * block_size for end in ends}
    least = hit.num_tokens + LEAST_BLOCKS_BEHIND * block_size
    return tuple(sorted(end for end in whole if least <= end < state.num_tokens))


def promise_states(
    state: RequestState, end: int, kv_cache: KvCacheManager, config: SchedulerConfig, lineup: Lineup
) -> tuple[KeptState, ...]:
    """Take slots for the states that a slice up to `end` will keep, the last ones first, as they spare most."""
    # As many as there are sequences that may begin.
    num_left = min(len(lineup.waiting), config.max_num_seqs - len(lineup.running))
    kept = []
    for milestone in reversed(state.milestones_between(state.num_computed, end)):
        if _may_keep(state, milestone, config):
            block_hash = _hash_before(state, milestone, kv_cache)
            slot = kv_cache.promise_state(state.sequence_id, block_hash, num_left)
            kept += [] if slot is None else [KeptState(milestone, slot)]
    return tuple(reversed(kept))


def keep_states(state: RequestState, start: int, kv_cache: KvCacheManager) -> None:
    """Keep the promised states of what was computed from `start` on."""
    for milestone in state.milestones_between(start, state.num_computed):
        kv_cache.keep_state(state.sequence_id, _hash_before(state, milestone, kv_cache))


def expect_state(
    state: RequestState,
    hit: PrefixHit,
    states: Mapping[SequenceId, RequestState],
    kv_cache: KvCacheManager,
    config: SchedulerConfig,
) -> bool:
    """Return whether a sequence that is being computed will keep a state from which this one can begin.

    One whose slice under way ends before it parts from this one is asked to keep its state there, if that is furthest.
    A state within a slice can be used only at the end of the slice: one that spares less than is computed behind it is
    not waited for, nor is one that spares too little anyway.
    """
    size = kv_cache.block_size
    hashes = state.hasher.hashes[: (state.num_tokens - 1) // size]
    asked, furthest = None, 0
    for other_id, announced_end in kv_cache.announced_by(hashes[hit.num_tokens // size :]):
        other = states[other_id]
        if other.status is Status.FINISHED:  # it goes no further than its slice
            continue
        end = _num_common(other.hasher.hashes, hashes) * size
        may_ask = end > announced_end and _may_keep(other, end, config)
        coming = end if may_ask else _last_promised(other, min(end, announced_end), kv_cache)
        if coming > furthest and announced_end - coming <= coming - hit.num_tokens:
            asked, furthest = other, coming
    if asked is None or furthest < hit.num_tokens + LEAST_BLOCKS_BEHIND * size:
        return False
    asked.milestones = tuple(sorted({*asked.milestones, furthest}))
    return True


def _last_promised(state: RequestState, end: int, kv_cache: KvCacheManager) -> int:
    """Return the last milestone up to `end` whose state the sequence's slice under way keeps; 0 if there is none."""
    coming = (
        milestone
        for milestone in state.milestones_between(state.num_computed, end)
        if kv_cache.slots.will_have(state.sequence_id, _hash_before(state, milestone, kv_cache))
    )
    return max(coming, default=0)


def _may_keep(state: RequestState, end: int, config: SchedulerConfig) -> bool:
    return not config.sees_items_whole or not any(item.span.is_cut_by(end) for item in state.media)


def _hash_before(state: RequestState, end: int, kv_cache: KvCacheManager) -> bytes:
    return state.hasher.hashes[end // kv_cache.block_size - 1]


def _num_common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """Return how many leading blocks are the same: the hash of each covers all before it."""
    places = range(min(len(left), len(right)))
    return bisect_left(places, True, key=lambda place: left[place] != right[place])
