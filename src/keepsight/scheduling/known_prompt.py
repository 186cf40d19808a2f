"""What of a sequence is known before it has a seat: its beginning, and the end that its answer begins from.

Nothing is, of whose caller wants to be told how likely each token of the prompt was; of whose wants its vector no end,
of which logits are kept and not the hidden state.
"""

from keepsight.scheduling.kv_cache_manager import NO_HIT, KvCacheManager, PrefixHit
from keepsight.scheduling.request_state import RequestState
from keepsight.scheduling.step_plan import EndName


def find_beginning(state: RequestState, kv_cache: KvCacheManager) -> PrefixHit:
    """One that holds pages goes on where it was; where others got further meanwhile, it lets go of its own."""
    hit = NO_HIT if state.tells_prompt else kv_cache.find_prefix(state.hasher.hashes, state.num_tokens)
    if kv_cache.num_blocks_of(state.sequence_id):
        if hit.num_tokens <= state.num_computed:
            is_next = hit.num_tokens + kv_cache.block_size > state.num_computed
            return PrefixHit((), state.num_computed, is_next and hit.is_being_computed)
        kv_cache.release(state.sequence_id)
        state.begin_again()
    if state.tells_prompt:
        return hit
    return kv_cache.reach_further(hit, state.hasher.name_of(len(hit.block_ids)), state.num_tokens)


def find_end(state: RequestState, hit: PrefixHit, kv_cache: KvCacheManager) -> EndName | None:
    """What it is kept as, if its first token can be drawn from it: all before it was hit."""
    if state.num_computed or state.num_sampled or state.tells_prompt or state.request.wants_vector:
        return None
    return kv_cache.find_end(hit, state.num_tokens, state.hasher.prompt_end)


def give_back(state: RequestState, kv_cache: KvCacheManager) -> None:
    """Its pages: until they are taken, all that was computed in them is found again."""
    if kv_cache.num_blocks_of(state.sequence_id):
        kv_cache.publish(state.sequence_id, state.hasher.name_of, state.num_computed)
    kv_cache.release(state.sequence_id)


def note_hit(state: RequestState, hit: PrefixHit, kv_cache: KvCacheManager) -> None:
    """For its caller and the statistics: with so much of it known it begins, for the first time."""
    if state.num_computed or state.num_sampled or state.num_preemptions:
        return
    state.num_cached_tokens = hit.num_tokens
    if state.is_first_choice and not state.tells_prompt:
        kv_cache.count(hit, state.num_tokens, state.num_loaded_tokens)
