"""The engine's counters, and the times when each request arrived, got its first turn and its first token.

Only observes; the engine loop reports each step. Numbers that other parts count anyway are copied, a few times a second
while there is work, and before a request's end is sent or the loop goes to sleep: a client that reads the counters
after its answer finds that answer counted.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from keepsight.engine.embedding_tiers import EmbeddingTiers
from keepsight.engine.pixel_source import PixelSource
from keepsight.engine.prefix_tiers import PrefixTiers
from keepsight.media import Modality
from keepsight.observe.catalogue import (
    ALL,
    ENCODED,
    ENCODER,
    MISMATCHED,
    MODALITIES,
    PREFIX,
    PREFIX_DISK,
    PROCESSOR,
    SET_ASIDE,
    TRANSFERRED,
    VERIFIED,
    slot_of,
)
from keepsight.observe.counters import Counters
from keepsight.observe.mean_cost import BulkCost, MeanCost
from keepsight.requests import EngineRequest, MediaReport, RequestBegun, TierStatus
from keepsight.scheduling.embedding_loads import Load
from keepsight.scheduling.request_state import Begun
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import EncodeTime, StepPlan, StepResult
from keepsight.scheduling.stretch_loads import StretchLoad

# Interval between copies while no request ends.
SECONDS = 0.1
# Limit on remembered values that may never be asked for.
MAX_REMEMBERED = 8192
RUNNING, WAITING = slot_of("num_requests_running"), slot_of("num_requests_waiting")
PREEMPTIONS = slot_of("num_preemptions_total")
RECALLED = slot_of("first_tokens_recalled_total")
GUESSED = slot_of("spec_decode_num_draft_tokens_total")
GUESSED_RIGHTLY = slot_of("spec_decode_num_accepted_tokens_total")
BLOCKS, BLOCKS_IN_USE = slot_of("kv_cache_blocks"), slot_of("kv_cache_blocks_in_use")
STATES_KEPT, STATES_EVICTED = slot_of("recurrent_states_kept"), slot_of("recurrent_states_evicted_total")
BLOCKS_PINNED, EMBEDDINGS_PINNED = slot_of("kv_cache_blocks_pinned"), slot_of("encoder_cache_pinned_bytes")
T = TypeVar("T")


class _Recent(dict[str, T]):
    """A dict that forgets its oldest entry beyond `MAX_REMEMBERED`."""

    def put(self, name: str, value: T) -> None:
        self.pop(name, None)
        self[name] = value
        if len(self) > MAX_REMEMBERED:
            del self[next(iter(self))]


class EngineMeter:
    def __init__(
        self,
        counters: Counters,
        scheduler: Scheduler,
        bytes_per_block: int,
        source: PixelSource,
        tiers: EmbeddingTiers | None = None,
        prefixes: PrefixTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counters, self._scheduler, self._bytes_per_block = counters, scheduler, bytes_per_block
        self._source, self._tiers, self._prefixes, self._clock = source, tiers, prefixes, clock
        # Where embeddings are looked for.
        self._lookup_order = ("device", *(() if tiers is None else tiers.names))
        self._copied_at, self._num_sequences = 0.0, 0
        # Whether a request has arrived since the last copy: if as many have ended, their number alone does not show it.
        self._has_new_request = False
        self._encoding, self._prompt_token = {modality: MeanCost() for modality in MODALITIES}, BulkCost()
        # Keyed by media hash and by encoder key.
        self._modalities = _Recent[Modality]()
        # Keyed by request id; by media hash (when pixels came, and whether the engine had kept them); by encoder key.
        self._arrivals, self._begins = _Recent[float](), _Recent[float]()
        self._pixels = _Recent[tuple[float, bool]]()
        # With the seconds that it had taken to encode what was loaded.
        self._load_begins, self._loads = _Recent[float](), _Recent[tuple[MediaReport, float]]()
        # The tiers that were set aside when these embeddings were last looked for.
        self._unasked = _Recent[frozenset[str]]()
        self._encodings = _Recent[EncodeTime]()
        self._copy()
        self.measure_tiers()

    # On the engine's loop -------------------------------------------------------------------------------------

    def note_arrived(self, request: EngineRequest) -> None:
        self._arrivals.put(request.request_id, self._clock())
        # Left over if a request with this id was aborted and has come again.
        self._begins.pop(request.request_id, None)
        self._has_new_request = True
        for item in request.media:
            self._modalities.put(item.media_hash, item.modality)

    def note_pixels(self, media_hash: str, *, was_cached: bool) -> None:
        """Note that the runner now has these pixels."""
        self._counters.add(TRANSFERRED[self._modality_of(media_hash)])
        self._pixels.put(media_hash, (self._clock(), was_cached))

    def note_found_pixels(self, media_hash: str) -> None:
        """Count a hit among the engine's own pixels; the frontend that is asked for missing ones counts the misses."""
        modality = self._modality_of(media_hash)
        self._counters.add(PROCESSOR.queries[modality])
        self._counters.add(PROCESSOR.hits[modality])

    def _modality_of(self, name: str) -> Modality:
        """Return the modality of a requested item; "image" if it was forgotten because of many later requests."""
        return self._modalities.get(name, "image")

    def note_load(self, load: Load) -> None:
        self._load_begins.put(load.encoder_key, self._clock())
        if self._tiers is not None:
            self._unasked.put(load.encoder_key, self._tiers.list_unasked())
        self._modalities.put(load.encoder_key, self._modality_of(load.media_hash))

    def note_loaded(self, encoder_key: str, tier: str, seconds_to_make: float) -> None:
        report = MediaReport(tier, self._load_begins.pop(encoder_key, 0.0), self._clock())
        self._loads.put(encoder_key, (report, seconds_to_make))
        self._encoding[self._modality_of(encoder_key)].suggest(seconds_to_make)

    def note_stretches(self, load: StretchLoad) -> None:
        """Count the tokens of these stretches as queried, unless the tier is set aside."""
        if self._prefixes is not None and self._prefixes.can_be_asked:
            self._counters.add(PREFIX_DISK.queries[ALL], self._num_tokens_of(load))

    def seconds_to_compute(self, load: StretchLoad) -> float:
        """Return the estimated time to compute these tokens; 0 until there is an estimate."""
        return self._num_tokens_of(load) * self._prompt_token.seconds

    def _num_tokens_of(self, load: StretchLoad) -> int:
        return len(load.hashes) * self._scheduler.stretches.num_tokens_each

    def note_step(self, plan: StepPlan, result: StepResult, seconds: float) -> list[RequestBegun]:
        """Note a step that took `seconds` to compute. Return what must be sent before the step's outputs."""
        now = self._clock()
        self._note_begun(plan, now - seconds)
        self._note_computed(plan, seconds)
        for encoding in plan.encode:
            self._modalities.put(encoding.encoder_key, encoding.modality)
        for key, took in result.encode_times.items():
            self._note_encoded(key, took)
        reports = [(self._report_begun(begun, now), begun.is_news) for begun in self._scheduler.take_begun()]
        num_sequences = len(self._scheduler.lineup)
        has_changed = self._has_new_request or self._num_sequences != num_sequences
        if has_changed or now - self._copied_at > SECONDS or (plan.is_empty and result.is_empty):
            self._copied_at, self._num_sequences, self._has_new_request = now, num_sequences, False
            self._copy()
        return [report for report, is_news in reports if is_news]

    def _note_begun(self, plan: StepPlan, now: float) -> None:
        for new in plan.new:
            if not self._begins.get(new.sequence_id[0], 0.0):
                self._begins.put(new.sequence_id[0], now)

    def _note_computed(self, plan: StepPlan, seconds: float) -> None:
        """Measure the cost of prompt tokens; answer tokens in the batch, one for each, get their share of the step."""
        num_tokens = sum(piece.length for piece in plan.now)
        if num_of_prompts := sum(piece.length for piece in plan.now if piece.length > 1):
            self._prompt_token.note(seconds * num_of_prompts / num_tokens, num_of_prompts)

    def _note_encoded(self, encoder_key: str, took: EncodeTime) -> None:
        modality = self._modality_of(encoder_key)
        self._counters.add(ENCODED[modality])
        self._encoding[modality].note(took.seconds)
        self._encodings.put(encoder_key, took)

    # Origins of a request's media -----------------------------------------------------------------------------

    def _report_begun(self, begun: Begun, now: float) -> RequestBegun:
        request_id = begun.request.request_id
        arrived = self._arrivals.pop(request_id, now)
        media = tuple(self._report_item(begun, index) for index in range(len(begun.request.media)))
        for index in begun.new_items:
            self._count_lookup(begun, index, media[index].found_in)
        return RequestBegun(request_id, arrived, self._begins.pop(request_id, now), now, media)

    def _report_item(self, begun: Begun, index: int) -> MediaReport:
        match begun.origins.get(index):
            case None:
                return MediaReport("prefix")
            case "tier":
                return self._find_load(begun.encoder_keys[index])[0]
            case "made":
                arrived, was_cached = self._pixels.get(begun.request.media[index].media_hash, (0.0, False))
                took = self._encodings.get(begun.encoder_keys[index], EncodeTime(0.0, 0.0))
                return MediaReport(None, took.began, took.ended, arrived, was_cached, took.num_together)
            case origin:
                return MediaReport(origin)

    def _find_load(self, encoder_key: str) -> tuple[MediaReport, float]:
        """Return the last load of these embeddings; if it was forgotten, one from the last tier."""
        return self._loads.get(encoder_key, (MediaReport(self._lookup_order[-1]), 0.0))

    def _count_lookup(self, begun: Begun, index: int, found_in: str | None) -> None:
        """Count the lookup of an item, once for its request however often preemption made it look again.

        It queried the device and each tier, unless it was set aside, up to the one that had it; all of them if none
        had.
        """
        modality, names = begun.request.media[index].modality, self._lookup_order
        unasked = self._unasked.get(begun.encoder_keys[index], frozenset())
        for name in names if found_in is None else names[: names.index(found_in) + 1]:
            if name == found_in or name not in unasked:
                self._counters.add(ENCODER[name].queries[modality])
        if found_in is not None:
            is_loaded = begun.origins[index] == "tier"
            seconds = self._find_load(begun.encoder_keys[index])[1] if is_loaded else self._encoding[modality].seconds
            self._counters.add(ENCODER[found_in].hits[modality])
            self._counters.add(ENCODER[found_in].saved_seconds[modality], seconds)

    # Numbers counted elsewhere --------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Copy the counters of other parts; each line is an addition in memory."""
        scheduler, counters = self._scheduler, self._counters
        counters.set(RUNNING, len(scheduler.lineup.running))
        counters.set(WAITING, scheduler.lineup.num_unseated)
        counters.follow(PREEMPTIONS, scheduler.pages.num_preemptions)
        counters.follow(GUESSED, scheduler.num_guesses)
        counters.follow(GUESSED_RIGHTLY, scheduler.num_right_guesses)
        self._copy_prefixes()
        self._copy_embeddings()
        counters.follow(VERIFIED, self._source.num_verified)
        counters.follow(MISMATCHED, self._source.num_mismatched)
        if (size := self._source.size()) is not None:
            counters.set_all(PROCESSOR.sizes(size.num_bytes, size.max_bytes, size.num_entries))
            counters.follow(PROCESSOR.evictions, size.num_evictions)

    def _copy_prefixes(self) -> None:
        kv, counters, per_block = self._scheduler.kv_cache, self._counters, self._bytes_per_block
        counters.set(BLOCKS, kv.pool.num_blocks)
        counters.set(BLOCKS_IN_USE, round(kv.usage * kv.pool.num_blocks))
        counters.set(BLOCKS_PINNED, kv.pool.num_pinned)
        counters.set(STATES_KEPT, kv.slots.num_kept)
        counters.follow(STATES_EVICTED, kv.slots.num_evicted)
        counters.follow(PREFIX.queries[ALL], kv.num_queried_tokens)
        counters.follow(RECALLED, kv.ends.num_found)
        counters.follow(PREFIX.evictions, kv.pool.num_evicted)
        found, findable = kv.pool.num_findable, kv.pool.num_blocks if kv.is_caching else 0
        counters.set_all(PREFIX.sizes(found * per_block, findable * per_block, found))
        num_own = kv.num_hit_tokens - kv.num_loaded_hit_tokens
        for slots, num_hit_tokens in ((PREFIX, num_own), (PREFIX_DISK, kv.num_loaded_hit_tokens)):
            num_new = counters.follow(slots.hits[ALL], num_hit_tokens)
            counters.add(slots.saved_seconds[ALL], num_new * self._prompt_token.seconds)

    def _copy_embeddings(self) -> None:
        cache, counters, slots = self._scheduler.media.encoder_cache, self._counters, ENCODER["device"]
        counters.follow(slots.evictions, cache.num_evictions)
        counters.set_all(slots.sizes(cache.num_bytes, cache.max_bytes, cache.num_entries))
        counters.set(EMBEDDINGS_PINNED, cache.num_pinned_bytes)

    # On any thread --------------------------------------------------------------------------------------------

    def measure_tiers(self) -> tuple[TierStatus, ...]:
        """Return the status of the tiers and update their counters; tiers change while the loop sleeps."""
        status = [tier for its in (self._tiers, self._prefixes) if its is not None for tier in its.status()]
        for tier in status:
            slots, each = ENCODER[tier.name], 1
            if tier.cache == "prefix":  # counted in blocks
                slots, each = PREFIX_DISK, self._scheduler.stretches.num_blocks_each
            self._counters.set_all(slots.sizes(tier.num_bytes, tier.max_bytes or 0, tier.num_entries * each))
            self._counters.follow(slots.evictions, tier.num_evictions * each)
            if (slot := SET_ASIDE.get((tier.cache, tier.name))) is not None:
                self._counters.set(slot, tier.reason is not None)
        return tuple(status)
