"""Decides how much of a prompt is computed next.

A piece ends before media that are not ready, is not too short, and for models whose pictures are computed whole, does
not end inside one.
"""

from keepsight.scheduling.media_claims import MediaClaims
from keepsight.scheduling.request_state import ParkedFor, RequestState
from keepsight.scheduling.step_draft import Cut, StepDraft

# A shorter piece of text before a picture that is not ready is not worth a step of its own.
MIN_TEXT_BEFORE_MEDIA = 32


def cut_piece(state: RequestState, start: int, draft: StepDraft, media: MediaClaims) -> Cut | ParkedFor:
    """Return how far to compute a prompt that is computed up to `start`, or what it has to wait for."""
    lacks = media.claim(state, state.first_item_after(start))
    most = _ready_end(state, start, media)
    if not _is_worth_a_step(state, start, most):
        return _why_parked(state, most, lacks)
    joins = draft.joins(most - start)
    state.num_to_join = most - start if joins and most == state.num_tokens else 0
    if not joins and not draft.beside_tokens_left:
        return ParkedFor.LANE
    end = min(most, start + draft.tokens_left(state, state.num_tokens - start, joins=joins))
    return Cut(end if draft.config.cuts_items else _whole_items_end(state, start, end), joins, lacks_room=end < most)


def _ready_end(state: RequestState, start: int, media: MediaClaims) -> int:
    """Return the position up to which all embeddings are held."""
    for index in range(state.first_item_after(start), len(state.media)):
        if not media.is_ready(state, index):
            return max(start, state.media[index].span.start)
    return state.num_tokens


def _is_worth_a_step(state: RequestState, start: int, end: int) -> bool:
    if end == state.num_tokens:
        return True
    if end == start:
        return False
    first_item = state.first_item_after(start)
    # Held embeddings must be used, or their room is not freed for others.
    if state.media[first_item].span.start < end:
        return True
    # After it gave its pages to others, it takes pages again only to get further than before.
    return end - start >= MIN_TEXT_BEFORE_MEDIA and end > state.gave_way_at


def _why_parked(state: RequestState, end: int, lacks: ParkedFor | None) -> ParkedFor:
    """Return what the sequence is parked for. `lacks`: what its first unclaimed item waits for."""
    is_being_encoded = state.first_item_after(end) in state.claimed_items
    return ParkedFor.ENCODER if is_being_encoded or lacks is None else lacks


def _whole_items_end(state: RequestState, start: int, end: int) -> int:
    """Return the last position up to `end` that cuts no media item."""
    split = next((item.span for item in state.media if item.span.is_cut_by(end)), None)
    return end if split is None else max(start, split.start)
