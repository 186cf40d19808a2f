"""Decides where in a prompt the state of a model's recurrent layers is kept, for others and for later turns.

A sequence can only begin where a state was kept, and each such *milestone* costs a step, as a slice must end there.
"""

from keepsight.scheduling.kv_cache_manager import PrefixHit
from keepsight.scheduling.request_state import RequestState

# A milestone closer than this many blocks behind the place where the sequence begins spares others too little.
LEAST_BLOCKS_BEHIND = 2


def find_milestones(state: RequestState, hit: PrefixHit, block_size: int) -> tuple[int, ...]:
    """Return the milestones of a sequence that begins with this hit: the last ends of blocks before these positions.

    Before its last token begins the next turn, or the same prompt again; at the end of the last media item, another
    question about it; where its common beginning with others ends, the next prompt with that beginning; and a pin
    promises that what it covers will be found.
    """
    ends = [state.num_tokens - 1, hit.num_common, *(pin.num_tokens for pin in state.request.pins)]
    ends += [item.span.end for item in state.media[-1:]]
    whole = {end // block_size * block_size for end in ends}
    least = hit.num_tokens + LEAST_BLOCKS_BEHIND * block_size
    return tuple(sorted(end for end in whole if least <= end < state.num_tokens))
