"""Finds what is cached of a sequence's prompt: its beginning, and its end, from which the answer begins.

Neither is used for a request that wants the prompt's log-probabilities. The end is not used for one that wants the
prompt's vector, as logits are kept and not the hidden state.
"""

from keepsight.scheduling.kv_cache_manager import NO_HIT, KvCacheManager, PrefixHit
from keepsight.scheduling.milestones import find_milestones
from keepsight.scheduling.request_state import RequestState
from keepsight.scheduling.step_plan import EndName


def find_beginning(state: RequestState, kv_cache: KvCacheManager) -> PrefixHit:
    """Find the cached beginning of a sequence.

    A sequence that holds pages goes on where it was, unless other sequences got further by now: then it releases them.
    With recurrent layers, one that is to begin also learns where to keep its state.
    """
    hit = NO_HIT if state.wants_prompt_logprobs else kv_cache.find_prefix(state.hasher.hashes, state.num_tokens)
    if kv_cache.num_blocks_of(state.sequence_id):
        if hit.num_tokens <= state.num_computed:
            num_coming = hit.num_coming if hit.num_coming > state.num_computed else 0
            return PrefixHit((), state.num_computed, num_coming)
        kv_cache.release(state.sequence_id)
        state.begin_again()
    if kv_cache.keeps_states:
        state.milestones = find_milestones(state, hit, kv_cache.block_size)
    if state.wants_prompt_logprobs:
        return hit
    return kv_cache.reach_further(hit, state.hasher.name_of(len(hit.block_ids)), state.num_tokens)


def find_end(state: RequestState, hit: PrefixHit, kv_cache: KvCacheManager) -> EndName | None:
    """Return the name of the kept end from which the first token can be drawn; None unless all before it was hit."""
    if state.num_computed or state.num_sampled or state.wants_prompt_logprobs or state.request.wants_vector:
        return None
    is_whole = len(hit.block_ids) == (state.num_tokens - 1) // kv_cache.block_size
    return kv_cache.ends.find(state.hasher.prompt_end) if is_whole else None


def name_end(state: RequestState, kv_cache: KvCacheManager) -> EndName | None:
    """Return a name under which to keep the end of a prompt that is computed to its end; None if it is of no use."""
    last_block = (state.num_tokens - 1) // kv_cache.block_size
    # With recurrent layers it is found together with the state after all blocks before its last token.
    lacks_state = (
        kv_cache.slots.num_slots
        and last_block
        and not kv_cache.slots.will_have(state.sequence_id, state.hasher.hashes[last_block - 1])
    )
    if state.num_sampled or state.request.wants_vector or lacks_state:
        return None
    return kv_cache.name_end(state.sequence_id, state.hasher.prompt_end)


def give_back(state: RequestState, kv_cache: KvCacheManager) -> None:
    """Release the sequence's pages; until they are evicted, everything computed in them can be found again."""
    if kv_cache.num_blocks_of(state.sequence_id):
        kv_cache.publish(state.sequence_id, state.hasher.name_of, state.num_computed)
    kv_cache.release(state.sequence_id)


def note_hit(state: RequestState, hit: PrefixHit, kv_cache: KvCacheManager) -> None:
    """Record, for the caller and the statistics, how much was cached when the sequence begins for the first time."""
    if state.num_computed or state.num_sampled or state.num_preemptions:
        return
    state.num_cached_tokens = hit.num_tokens
    if state.is_first_choice and not state.wants_prompt_logprobs:
        kv_cache.count(hit, state.num_tokens, 0 if state.loaded is None else state.loaded.take())
