"""Decides where in a prompt the state of a model's recurrent layers is kept, for others and for later turns.

A sequence can only begin where a state was kept, and each such *milestone* costs a step, as a slice must end there.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from keepsight.scheduling.kv_cache_manager import KvCacheManager, PrefixHit
from keepsight.scheduling.request_state import RequestState

# A milestone closer than this many blocks behind the place where the sequence begins spares others too little.
LEAST_BLOCKS_BEHIND = 2


def find_milestones(state: RequestState, hit: PrefixHit, block_size: int) -> tuple[int, ...]:
    """Return the milestones of a sequence that begins with this hit: the last ends of blocks before these positions.

    Before its last token begins the next turn, or the same prompt again; at the end of the last media item, another
    question about it; where its common beginning with others ends, the next prompt with that beginning; and where a
    pin ends, whatever it was set for.  A pin on what is cached further already gets no milestone: the next prompt that
    needs it finds its common beginning only, and keeps the state there.
    """
    ends = [state.num_tokens - 1, hit.num_common, *(pin.num_tokens for pin in state.request.pins)]
    ends += [item.span.end for item in state.media[-1:]]
    whole = {end // block_size * block_size for end in ends}
    least = hit.num_tokens + LEAST_BLOCKS_BEHIND * block_size
    return tuple(sorted(end for end in whole if least <= end < state.num_tokens))


def ask_for_state(
    state: RequestState, hit: PrefixHit, running: Iterable[RequestState], kv_cache: KvCacheManager, *, cuts_items: bool
) -> bool:
    """Ask a sequence that is being computed to keep its state where it parts from this one: it gets a milestone there.

    Return False if none can: all slices under way go further, or none may end there, or it would spare too little.
    """
    size = kv_cache.block_size
    hashes = state.hasher.hashes[: (state.num_tokens - 1) // size]
    asked, furthest = None, 0
    for other in running:
        announced_end = kv_cache.announced_end(other.sequence_id)
        if announced_end is None:
            continue
        end = _num_common(other.hasher.hashes, hashes) * size
        may_end = cuts_items or not any(item.span.is_cut_by(end) for item in other.media)
        if may_end and end >= announced_end and end > furthest:
            asked, furthest = other, end
    if asked is None or furthest < hit.num_tokens + LEAST_BLOCKS_BEHIND * size:
        return False
    asked.milestones = tuple(sorted({*asked.milestones, furthest}))
    return True


def _num_common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    """Return how many leading blocks are the same: the hash of each covers all before it."""
    places = range(min(len(left), len(right)))
    return bisect_left(places, True, key=lambda place: left[place] != right[place])
