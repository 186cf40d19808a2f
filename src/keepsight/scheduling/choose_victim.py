"""From whom pages are taken for one that lacks them; whether and how is decided elsewhere."""

import itertools

from keepsight.scheduling.kv_cache_manager import KvCacheManager
from keepsight.scheduling.lineup import Lineup, last_of
from keepsight.scheduling.request_state import ParkedFor, RequestState, Status

MEDIA = (ParkedFor.PIXELS, ParkedFor.TIERS, ParkedFor.ENCODER)


def last_holder_behind(state: RequestState, lineup: Lineup, kv_cache: KvCacheManager) -> RequestState | None:
    """A running sequence takes from all behind it, one that waits only from those that do not run."""
    holders = itertools.chain(lineup.unseated(), lineup.running if state.status is Status.RUNNING else ())
    behind = (each for each in holders if each.order > state.order and not each.is_under_way)
    return last_of(each for each in behind if kv_cache.num_blocks_of(each.sequence_id))


def last_holder_short_of_media(lineup: Lineup, kv_cache: KvCacheManager) -> RequestState | None:
    """Wherever it stands, it holds nobody back; but who gave way already gets further before it does so again."""
    short_of_media = (each for each in lineup.parked if each.parked_for in MEDIA)
    return last_of(
        each
        for each in short_of_media
        if each.num_computed > each.gave_way_at and kv_cache.num_blocks_of(each.sequence_id)
    )
