"""Builds the status of a cache's tiers, nearest first."""

from keepsight.requests import CacheWithTiers, TierStatus
from keepsight.tiers.tiered_store import TieredStore


def tier_statuses(store: TieredStore, cache: CacheWithTiers) -> tuple[TierStatus, ...]:
    reasons, hits, left_out = store.why_unused(), dict(store.hits), store.num_left_out
    return tuple(
        TierStatus(
            cache=cache,
            name=name,
            reason=reasons.get(name),
            num_bytes=stats.num_bytes,
            max_bytes=stats.max_bytes,
            num_entries=stats.num_entries,
            num_hits=hits.get(name, 0),
            num_evictions=stats.num_evictions,
            num_damaged=stats.num_damaged,
            num_left_out=left_out.get(name, 0),
        )
        for name, stats in store.stats().items()
    )
