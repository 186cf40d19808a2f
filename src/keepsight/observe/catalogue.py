"""All metrics of a server: name, meaning, and slot in a page of counters.

All series are known in advance, so a page is an array of the same length in every process, and pages can be summed
without names. Knows nothing of processes or of who counts what.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from keepsight.media import EMBEDDING_TIERS, Modality

Labels = tuple[tuple[str, str], ...]
Kind = Literal["counter", "gauge", "histogram"]
# Upper bounds of every histogram's buckets: 1, 2, 5 of each decade, from the time of a cache hit to that of a long
# answer on a CPU. A percentile is only as precise as its bucket is wide, and unknown beyond the last bound.
BOUNDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0),
)
# One bucket for each bound, one for larger values, and the sum.
HISTOGRAM_SLOTS = len(BOUNDS) + 2

MODALITIES: tuple[Modality, ...] = get_args(Modality)
# The modality of prefix blocks, which hold text too, and of a cache's sizes, as one budget covers all modalities.
ALL = "all"
CACHES = (
    ("processor", "host"),
    *(("encoder", tier) for tier in EMBEDDING_TIERS),
    ("prefix", "device"),
    ("prefix", "disk"),
)
# Those that are not used for a while once they fail or are slow.
FALLIBLE_TIERS = (("encoder", "disk"), ("encoder", "remote"), ("prefix", "disk"))
Stage = Literal["fetch", "identify", "decode", "resize", "transfer", "wait", "load", "encode", "prefill", "generate"]
STAGES: tuple[Stage, ...] = get_args(Stage)
FINISHED_REASONS = ("stop", "length", "abort", "error")
STATUSES = ("2xx", "3xx", "4xx", "5xx")
PROCESSES = ("engine", "frontend", "media_worker")
NO_LABELS: tuple[Labels, ...] = ((),)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    meaning: str
    series: tuple[Labels, ...] = NO_LABELS

    @property
    def slots_per_series(self) -> int:
        return HISTOGRAM_SLOTS if self.kind == "histogram" else 1


def _each(label: str, values: Iterable[str]) -> tuple[Labels, ...]:
    return tuple(((label, value),) for value in values)


def _each_cache(modalities_of: Callable[[str], Iterable[str]]) -> tuple[Labels, ...]:
    return tuple(
        (("cache", cache), ("tier", tier), ("modality", modality))
        for cache, tier in CACHES
        for modality in modalities_of(cache)
    )


def _modalities_of(cache: str) -> tuple[str, ...]:
    return (ALL,) if cache == "prefix" else MODALITIES


_ASKED, _HELD = _each_cache(_modalities_of), _each_cache(lambda _cache: (ALL,))
_OF_MEDIA = _each("modality", MODALITIES)

METRICS = (
    Metric("keepsight_cache_queries_total", "counter", "Lookups: items; tokens in the prefix cache.", _ASKED),
    Metric("keepsight_cache_hits_total", "counter", "Hits: items; tokens in the prefix cache.", _ASKED),
    Metric("keepsight_cache_evictions_total", "counter", "Evictions: items; blocks in the prefix cache.", _HELD),
    Metric("keepsight_cache_saved_seconds_total", "counter", "Estimated time that hits saved.", _ASKED),
    Metric("keepsight_cache_bytes", "gauge", "Size of the content.", _HELD),
    Metric("keepsight_cache_budget_bytes", "gauge", "Size limit; 0 if something else sets it.", _HELD),
    Metric("keepsight_cache_entries", "gauge", "Entries: items; blocks in the prefix cache.", _HELD),
    Metric(
        "keepsight_cache_tier_set_aside",
        "gauge",
        "1 while the tier is not used, as it failed or was slow.",
        tuple((("cache", cache), ("tier", tier)) for cache, tier in FALLIBLE_TIERS),
    ),
    Metric("keepsight_media_fetched_total", "counter", "Downloads, except of unchanged files.", _OF_MEDIA),
    Metric("keepsight_media_decoded_total", "counter", "Pictures, films and sounds decoded.", _OF_MEDIA),
    Metric("keepsight_media_preprocessed_total", "counter", "Pictures, crops and moments of films resized.", _OF_MEDIA),
    Metric("keepsight_media_transferred_total", "counter", "Items whose pixels were given to the runner.", _OF_MEDIA),
    Metric("keepsight_media_encoded_total", "counter", "Items encoded.", _OF_MEDIA),
    Metric("keepsight_stage_seconds", "histogram", "Duration of each stage of a request.", _each("stage", STAGES)),
    Metric("keepsight_time_to_first_token_seconds", "histogram", "From a request's arrival to its first token."),
    Metric("keepsight_inter_token_latency_seconds", "histogram", "Between tokens of consecutive steps of a request."),
    Metric("keepsight_e2e_request_latency_seconds", "histogram", "From a request's arrival to its end."),
    Metric("keepsight_num_requests_running", "gauge", "Running sequences."),
    Metric(
        "keepsight_num_requests_waiting",
        "gauge",
        "Sequences that wait for a seat, or for their inputs; and requests that wait for an engine.",
    ),
    Metric("keepsight_num_preemptions_total", "counter", "Sequences whose KV blocks were taken back."),
    Metric("keepsight_first_tokens_recalled_total", "counter", "Answers begun from the kept end of the same prompt."),
    Metric("keepsight_spec_decode_num_draft_tokens_total", "counter", "Answer tokens that were guessed."),
    Metric("keepsight_spec_decode_num_accepted_tokens_total", "counter", "Guessed answer tokens that were right."),
    Metric("keepsight_prompt_tokens_total", "counter", "Tokens of answered prompts."),
    Metric("keepsight_generation_tokens_total", "counter", "Tokens of answers."),
    Metric(
        "keepsight_request_success_total",
        "counter",
        "Requests that ended, by reason.",
        _each("finished_reason", FINISHED_REASONS),
    ),
    Metric("keepsight_http_responses_total", "counter", "Responses, including refusals.", _each("status", STATUSES)),
    Metric("keepsight_kv_cache_blocks", "gauge", "All KV blocks."),
    Metric("keepsight_kv_cache_blocks_in_use", "gauge", "KV blocks held by sequences."),
    Metric("keepsight_kv_cache_blocks_pinned", "gauge", "KV blocks that are evicted last."),
    Metric("keepsight_recurrent_states_kept", "gauge", "States of recurrent layers that prompts may begin with."),
    Metric("keepsight_recurrent_states_evicted_total", "counter", "Kept states whose room was taken for others."),
    Metric("keepsight_encoder_cache_pinned_bytes", "gauge", "Embeddings on the device that are evicted last."),
    Metric("keepsight_engine_silent_seconds", "gauge", "Time since the last sign of life of any engine, the longest."),
    Metric(
        "keepsight_processes_restarted_total",
        "counter",
        "Processes that died and were replaced.",
        _each("process", PROCESSES),
    ),
    Metric("keepsight_verified_hits_total", "counter", "Hits of the processor cache that were recomputed to compare."),
    Metric("keepsight_mismatched_hits_total", "counter", "Recomputed hits that held other pixels."),
)

_STARTS = tuple(accumulate((len(each.series) * each.slots_per_series for each in METRICS), initial=0))
NUM_SLOTS = _STARTS[-1]
SLOTS: Mapping[tuple[str, Labels], int] = {
    (metric.name, labels): start + index * metric.slots_per_series
    for metric, start in zip(METRICS, _STARTS, strict=False)
    for index, labels in enumerate(metric.series)
}
GAUGES = frozenset(SLOTS[each.name, labels] for each in METRICS if each.kind == "gauge" for labels in each.series)


def slot_of(name: str, *values: str) -> int:
    """Return the slot of the series with these label values, in order; for a histogram, that of its first bucket."""
    [metric] = (metric for metric in METRICS if metric.name == f"keepsight_{name}")
    [labels] = (labels for labels in metric.series if tuple(value for _, value in labels) == values)
    return SLOTS[metric.name, labels]


# Slots by modality.
Slots = Mapping[str, int]


def _slots_of(name: str, *labels: str, modalities: Iterable[str] = MODALITIES) -> Slots:
    return {modality: slot_of(name, *labels, modality) for modality in modalities}


@dataclass(frozen=True, slots=True)
class CacheSlots:
    """The slots of one cache in one tier."""

    queries: Slots
    hits: Slots
    saved_seconds: Slots
    evictions: int
    num_bytes: int
    budget_bytes: int
    entries: int

    @classmethod
    def of(cls, cache: str, tier: str) -> "CacheSlots":
        def asked(name: str) -> Slots:
            return _slots_of(f"cache_{name}", cache, tier, modalities=_modalities_of(cache))

        def held(name: str) -> int:
            return slot_of(f"cache_{name}", cache, tier, ALL)

        return cls(
            asked("queries_total"),
            asked("hits_total"),
            asked("saved_seconds_total"),
            held("evictions_total"),
            held("bytes"),
            held("budget_bytes"),
            held("entries"),
        )

    def sizes(self, num_bytes: float, budget_bytes: float, entries: float) -> dict[int, float]:
        """Return the values of the size gauges, by slot."""
        return {self.num_bytes: num_bytes, self.budget_bytes: budget_bytes, self.entries: entries}


PROCESSOR = CacheSlots.of("processor", "host")
PREFIX, PREFIX_DISK = CacheSlots.of("prefix", "device"), CacheSlots.of("prefix", "disk")
ENCODER = {tier: CacheSlots.of("encoder", tier) for cache, tier in CACHES if cache == "encoder"}
SET_ASIDE = {place: slot_of("cache_tier_set_aside", *place) for place in FALLIBLE_TIERS}
# Gauges of tiers that all engines share: each engine reports the whole tier, as far as it knows.
COMMON_GAUGES = frozenset(
    (
        *SET_ASIDE.values(),
        *(slot for slots in (ENCODER["disk"], ENCODER["remote"], PREFIX_DISK) for slot in slots.sizes(0, 0, 0)),
    )
)
STAGE: Mapping[str, int] = {stage: slot_of("stage_seconds", stage) for stage in STAGES}
FETCHED, DECODED, PREPROCESSED, TRANSFERRED, ENCODED = (
    _slots_of(f"media_{work}_total") for work in ("fetched", "decoded", "preprocessed", "transferred", "encoded")
)
VERIFIED, MISMATCHED = slot_of("verified_hits_total"), slot_of("mismatched_hits_total")
RESPONSES = {int(status[0]): slot_of("http_responses_total", status) for status in STATUSES}
RESTARTED = {kind: slot_of("processes_restarted_total", kind) for kind in PROCESSES}
