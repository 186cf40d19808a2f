"""What an engine counts of its steps, and what it reports of a request that has begun. The runner is a fake."""

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import pytest

from keepsight.engine.embedding_tiers import EmbeddingFormat, EmbeddingTiers
from keepsight.engine.engine_loop import EngineLoop
from keepsight.engine.engine_meter import (
    BLOCKS,
    BLOCKS_IN_USE,
    BLOCKS_PINNED,
    EMBEDDINGS_PINNED,
    GUESSED,
    GUESSED_RIGHTLY,
    PREEMPTIONS,
    RECALLED,
    RUNNING,
    STATES_EVICTED,
    STATES_KEPT,
    WAITING,
    EngineMeter,
)
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import KeptPixels, PixelSource
from keepsight.engine.prefix_tiers import PrefixTiers, StretchFormat
from keepsight.observe.catalogue import (
    ENCODED,
    ENCODER,
    MISMATCHED,
    PREFIX,
    PREFIX_DISK,
    PROCESSOR,
    SET_ASIDE,
    TRANSFERRED,
    VERIFIED,
    Slots,
)
from keepsight.observe.counters import Counters
from keepsight.requests import (
    AbortRequest,
    FromEngine,
    MediaArrived,
    MediaNeeded,
    PromptPin,
    RequestBegun,
    RequestFailed,
    ResetCaches,
    TokenOutput,
)
from keepsight.scheduling.request_state import Begun, Origin
from keepsight.scheduling.scheduler import Scheduler
from keepsight.scheduling.step_plan import EncodeTime, Slice, StepPlan, StepResult
from keepsight.testing import FakeRunner, pixels_like
from keepsight.tiers.entry_key import entry_key
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.tier_guard import GuardLimits
from keepsight.tiers.tiered_store import TieredStore
from tests.counted import read_counters
from tests.scheduling.drive import END_IDS, TOKENS_PER_PICTURE, make_config, make_request
from tests.tiers.fake_tier import FakeTier

DEVICE, HOST = ENCODER["device"], ENCODER["host"]


class Engine:
    """An engine stepped by hand until all requests are answered; each look at the clock is a second later.

    The loop's own clock, which times its steps, is always slower.
    """

    def __init__(
        self,
        source: PixelSource | None = None,
        tiers: EmbeddingTiers | None = None,
        prefix_store: TieredStore | None = None,
        **config: Any,
    ) -> None:
        made, source = make_config(has_tiers=tiers is not None, **config), source or PixelSource()
        self.scheduler, self.inbox, self.counters = Scheduler(made, END_IDS), Inbox(), Counters()
        keep = (lambda *_: None) if tiers is None else tiers.keeping()
        self._ticks = count(1)
        prefixes = None
        if prefix_store is not None:
            prefixes = PrefixTiers(prefix_store, bytes.hex, StretchFormat("int64", (2, 4)), self.inbox.wake)
        keep_stretch = (lambda *_: None) if prefixes is None else prefixes.keep
        num_slots = made.kv_cache.num_state_slots
        self.runner = FakeRunner(
            64, 4, keep=keep, clock=self.look_at_clock, keep_stretch=keep_stretch, num_state_slots=num_slots
        )
        self.meter = EngineMeter(self.counters, self.scheduler, 100, source, tiers, prefixes, clock=self.look_at_clock)
        self.loop = EngineLoop(self.scheduler, self.runner, self.inbox, self.take, source, tiers, self.meter, prefixes)
        self.sent: list[FromEngine] = []

    def look_at_clock(self) -> float:
        return float(next(self._ticks))

    def take(self, outputs: Any) -> None:
        self.sent += outputs
        for output in outputs:
            if isinstance(output, MediaNeeded):
                for media_hash in output.media_hashes:
                    self.inbox.try_put(MediaArrived(media_hash, pixels_like(media_hash)))

    def ask(self, request_id: str, *parts: int | str, **options: Any) -> RequestBegun | None:
        """Return what was reported of the request before its first token."""
        self.sent.clear()
        self.inbox.try_put(make_request(request_id, *parts, **options))
        self.step_until_answered()
        of_request = [each for each in self.sent if isinstance(each, RequestBegun | TokenOutput)]
        stories = [each for each in of_request if isinstance(each, RequestBegun)]
        assert stories == [each for each in of_request[:1] if isinstance(each, RequestBegun)]
        return stories[0] if stories else None

    def step_until_answered(self) -> None:
        self.loop.step()
        while self.scheduler.lineup:
            self.loop.step()

    def compute(self, seconds: float, *lengths: int) -> None:
        """A step with pieces of these lengths that seems to take `seconds`."""
        pieces = [Slice((str(length), 0), 0, length, 0, (), samples=True) for length in lengths]
        self.meter.note_step(StepPlan(now=pieces), StepResult(), seconds)

    def counted(self, *slots: Slots | int) -> list[float]:
        return read_counters(self.counters, *slots)


def test_a_new_picture_is_reported_as_made_and_counted_once() -> None:
    engine = Engine()
    story = engine.ask("a", 3, "x", 4)
    assert story is not None
    [picture] = story.media
    assert picture.found_in is None
    assert story.arrived < picture.arrived < picture.ended < story.answered
    assert picture.ended - picture.began == pytest.approx(0.01)
    assert story.arrived < story.began < story.answered
    assert engine.counted(TRANSFERRED, ENCODED, DEVICE.queries, DEVICE.hits) == [1, 1, 1, 0]


def test_a_request_that_reuses_an_aborted_id_is_not_given_the_first_one_s_times() -> None:
    engine = Engine(max_prompt_tokens_beside_streams=4)
    engine.runner.set_pace(lambda: False)
    engine.inbox.try_put(make_request("stream", 3, max_tokens=40, ignore_eos=True))
    engine.loop.step()
    engine.inbox.try_put(make_request("a", 20))
    engine.loop.step()
    assert engine.runner.plans[-1].beside
    engine.inbox.try_put(AbortRequest("a"))
    engine.inbox.try_put(AbortRequest("stream"))
    engine.loop.step()
    engine.runner.set_pace(lambda: True)
    story = engine.ask("a", 3)
    assert story is not None
    assert story.arrived < story.began < story.answered


def test_the_same_prompt_again_is_answered_by_the_prefix_cache() -> None:
    engine = Engine()
    engine.ask("a", 3, "x", 4)
    story = engine.ask("b", 3, "x", 4)
    assert story is not None
    assert [each.found_in for each in story.media] == ["prefix"]
    assert engine.counted(TRANSFERRED, ENCODED, DEVICE.queries, PREFIX.queries, PREFIX.hits) == [1, 1, 1, 26, 12]
    assert engine.counted(PREFIX.saved_seconds)[0] > 0
    assert engine.counted(RECALLED) == [engine.scheduler.kv_cache.ends.num_found] == [1]


def test_found_tokens_are_valued_by_long_steps_and_not_by_later_short_ones() -> None:
    engine = Engine()
    engine.compute(1.0, 1000)
    for _ in range(50):
        engine.compute(0.1, 14)
        engine.compute(0.1, 1, 1)
        engine.compute(0.2, 14, 1)
    engine.scheduler.kv_cache.num_hit_tokens += 1000
    for _ in range(2):
        engine.meter.note_step(StepPlan(), StepResult(), 0.0)
    assert engine.counted(PREFIX.saved_seconds) == [pytest.approx(1.0, rel=0.2)]


def test_the_cost_of_computing_tokens_is_updated() -> None:
    engine = Engine()
    engine.compute(1.0, 1000)
    for _ in range(20):
        engine.compute(3.0, 1000)
    engine.scheduler.kv_cache.num_hit_tokens += 1000
    engine.meter.note_step(StepPlan(), StepResult(), 0.0)
    assert engine.counted(PREFIX.saved_seconds) == [pytest.approx(3.0, rel=0.1)]


def test_another_prompt_about_a_known_picture_is_answered_by_the_encoder_cache() -> None:
    engine = Engine()
    engine.ask("a", 3, "x", 4)
    story = engine.ask("b", 5, "x", 4)
    assert story is not None
    assert [each.found_in for each in story.media] == ["device"]
    assert engine.counted(ENCODED, DEVICE.queries, DEVICE.hits) == [1, 2, 1]
    # The duration of the last encodings.
    assert engine.counted(DEVICE.saved_seconds) == [pytest.approx(0.01)]


def test_pictures_encoded_together_report_the_whole_time_and_save_their_share() -> None:
    engine = Engine(caches_prefixes=False)
    run, took = engine.runner.run, EncodeTime(0.001, 0.013, num_together=2)
    engine.runner.run = lambda plan: _with_times(run(plan), took)  # type: ignore[method-assign]
    story = engine.ask("a", 3, "x", "y", 4)
    assert story is not None
    assert [(each.began, each.ended, each.num_together) for each in story.media] == [took, took]
    engine.ask("b", 5, "x", 4)
    assert engine.counted(DEVICE.hits, DEVICE.saved_seconds) == [1, pytest.approx(0.006)]


@pytest.mark.parametrize("shares_embeddings", [False, True])
def test_encodings_are_counted_by_kind_whatever_the_cache(shares_embeddings: bool) -> None:
    engine = Engine(shares_embeddings=shares_embeddings)
    request = make_request("a", 3, "x", 4)
    [item] = request.media
    engine.inbox.try_put(replace(request, media=(replace(item, modality="audio"),)))
    engine.step_until_answered()
    assert engine.counted(ENCODED["audio"], ENCODED["image"]) == [1, 0]


def _with_times(result: StepResult, took: EncodeTime) -> StepResult:
    return replace(result, encode_times=dict.fromkeys(result.encode_times, took))


@pytest.mark.parametrize("has_tiers", [False, True])
def test_after_a_reset_everything_is_done_and_counted_again(has_tiers: bool) -> None:
    engine = Engine(tiers=in_host_memory() if has_tiers else None)
    engine.ask("a", 3, "x", 4)
    engine.inbox.try_put(ResetCaches("reset", prefix=True, encoder=True))
    story = engine.ask("b", 3, "x", 4)
    assert story is not None
    assert [each.found_in for each in story.media] == [None]
    assert engine.counted(TRANSFERRED, ENCODED, DEVICE.hits) == [2, 2, 0]


def test_items_made_for_the_rest_of_a_known_prompt_are_reported_when_made() -> None:
    engine = Engine()
    engine.ask("a", 1, "x", 6, "y", max_tokens=1)
    # It takes all free pages, and the one that holds what follows the last full block.
    engine.ask("crowd", 4 * 60, cache_salt="its own", max_tokens=1)
    engine.inbox.try_put(ResetCaches("reset", prefix=False, encoder=True, processor=False))
    engine.sent.clear()
    engine.inbox.try_put(make_request("b", 1, "x", 6, "y", max_tokens=4))
    engine.loop.step()
    while engine.scheduler.lineup:
        engine.loop.step()
    sent = [each for each in engine.sent if isinstance(each, RequestBegun | TokenOutput)]
    reports = [each for each in sent if isinstance(each, RequestBegun)]
    assert [sent.index(each) for each in reports] == [0, 2]
    assert [[each.found_in for each in story.media] for story in reports] == [["prefix", "prefix"], ["prefix", None]]
    assert engine.counted(ENCODED) == [3]


def test_items_found_for_the_rest_of_a_known_prompt_are_counted_though_not_reported() -> None:
    engine = Engine()
    engine.ask("a", 1, "x", 6, "y", max_tokens=1)
    # It takes all free pages, and the one that holds what follows the last full block.
    engine.ask("crowd", 4 * 60, cache_salt="its own", max_tokens=1)
    before = engine.counted(DEVICE.queries, DEVICE.hits)
    engine.sent.clear()
    engine.inbox.try_put(make_request("b", 1, "x", 6, "y", max_tokens=4))
    engine.step_until_answered()
    reports = [each for each in engine.sent if isinstance(each, RequestBegun)]
    assert [[each.found_in for each in story.media] for story in reports] == [["prefix", "prefix"]]
    assert [now - then for now, then in zip(engine.counted(DEVICE.queries, DEVICE.hits), before, strict=True)] == [1, 1]


def test_tokens_from_a_tier_count_as_its_hits_and_not_as_the_device_s() -> None:
    tier = FakeTier()
    for given in (0, 16):
        store = TieredStore(None, [tier])
        engine = Engine(prefix_store=store, blocks_per_stretch=2)
        engine.ask("a", 19)
        assert engine.counted(PREFIX.hits, PREFIX_DISK.hits, PREFIX_DISK.queries) == [0, given, 16]
        engine.ask("b", 19)
        assert engine.counted(PREFIX.hits, PREFIX_DISK.hits, PREFIX_DISK.queries) == [18, given, 16]
        assert store.wait_written(20)
        engine.meter.measure_tiers()
        # Two stretches of two blocks.
        assert engine.counted(PREFIX_DISK.entries) == [4]
        store.close()


def in_host_memory(max_bytes: int = 1 << 20) -> EmbeddingTiers:
    name = partial(entry_key, model_digest="model", processor="", dtype="fake")
    width = 48 // TOKENS_PER_PICTURE
    return EmbeddingTiers(
        TieredStore(HostTier(max_bytes), []), name, EmbeddingFormat("uint8", width, width), lambda: None
    )


def test_embeddings_from_a_tier_are_reported_with_its_name() -> None:
    tiers = in_host_memory()
    engine = Engine(tiers=tiers, num_pictures=1)
    engine.ask("a", 3, "x", 4)
    engine.ask("b", 5, "y", 4)
    story = engine.ask("c", 7, "x", 4)
    tiers.close()
    assert story is not None
    [picture] = story.media
    assert picture.found_in == "host"
    assert 0 < picture.began < picture.ended < story.answered
    assert engine.counted(ENCODED, HOST.queries, HOST.hits) == [2, 3, 1]
    assert engine.counted(ENCODER["disk"].queries, ENCODER["remote"].queries) == [0, 0]


def test_embeddings_from_a_tier_save_what_these_very_ones_took() -> None:
    tiers = in_host_memory()
    engine = Engine(tiers=tiers, num_pictures=1)
    engine.ask("a", 3, "x", 4)
    run = engine.runner.run
    engine.runner.run = lambda plan: _with_times(run(plan), EncodeTime(0, 5))  # type: ignore[method-assign]
    engine.ask("b", 5, "y", 4)
    engine.ask("c", 7, "x", 4)
    tiers.close()
    assert engine.counted(HOST.hits, HOST.saved_seconds) == [1, pytest.approx(0.01)]


@pytest.mark.parametrize(
    ("names", "found_in", "asked"),
    [
        (("host", "disk"), "device", set()),
        (("host", "disk", "remote"), "host", {"host"}),
        (("host", "disk", "remote"), "remote", {"host", "disk", "remote"}),
        (("host", "remote"), "remote", {"host", "remote"}),
        (("disk",), "disk", {"disk"}),
        (("host", "disk"), None, {"host", "disk"}),
    ],
)
def test_a_lookup_is_a_query_of_the_device_and_of_each_tier_there_is_as_far_as_it_goes(
    names: tuple[str, ...], found_in: str | None, asked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = in_host_memory()
    monkeypatch.setattr(tiers, "names", names)
    engine = Engine(tiers=tiers)
    origin: Origin = "made" if found_in is None else "device" if found_in == "device" else "tier"
    engine.meter._count_lookup(Begun(make_request("a", "x"), {0: origin}, (0,), ("x",)), 0, found_in)
    tiers.close()
    assert {name for name, slots in ENCODER.items() if engine.counted(slots.queries) == [1]} == {"device", *asked}
    assert {name for name, slots in ENCODER.items() if engine.counted(slots.hits) == [1]} == {found_in} - {None}


def test_a_lookup_counts_once_for_its_request_even_if_preemption_makes_it_look_again() -> None:
    tiers = in_host_memory()
    engine = Engine(tiers=tiers, num_blocks=12, num_pictures=1, caches_prefixes=False)
    for picture in "xyz":  # each is new, and is loaded again after a preemption
        engine.inbox.try_put(make_request(picture, 1, picture, 3, max_tokens=20, ignore_eos=True))
    engine.step_until_answered()
    status = engine.meter.measure_tiers()
    tiers.close()
    assert engine.counted(PREEMPTIONS)[0] > 0
    assert sum(tier.num_hits for tier in status) > 0
    assert engine.counted(ENCODED, DEVICE.queries, DEVICE.hits, HOST.queries, HOST.hits) == [3, 3, 0, 3, 0]
    assert engine.counted(HOST.saved_seconds) == [0]


@pytest.mark.parametrize("has_tiers", [False, True])
def test_what_fails_before_its_first_token_queries_neither_the_device_nor_a_tier(has_tiers: bool) -> None:
    tiers = in_host_memory() if has_tiers else None
    engine = Engine(tiers=tiers)
    engine.runner.bad_media.add("bad")
    engine.ask("failing", 3, "good", "bad", 4)
    if tiers is not None:
        tiers.close()
    assert engine.counted(DEVICE.queries, HOST.queries) == [0, 0]


def test_how_full_a_tier_is_and_what_went_from_it_is_counted_when_it_is_measured() -> None:
    tiers = in_host_memory(max_bytes=100)
    engine = Engine(tiers=tiers)
    engine.ask("a", 3, "x", "y", "z", 4)
    [status] = engine.meter.measure_tiers()
    tiers.close()
    assert engine.counted(HOST.num_bytes, HOST.budget_bytes, HOST.entries, HOST.evictions) == [96, 100, 2, 1]
    assert (status.num_bytes, status.max_bytes, status.num_entries, status.num_evictions) == (96, 100, 2, 1)


def test_a_new_engine_s_tiers_have_their_budgets_and_contents_before_anything_is_asked() -> None:
    tiers = in_host_memory(max_bytes=100)
    Engine(tiers=tiers).ask("a", 3, "x", 4)
    engine = Engine(tiers=tiers)
    tiers.close()
    assert engine.counted(HOST.num_bytes, HOST.budget_bytes, HOST.entries) == [48, 100, 1]


def test_embeddings_are_valued_by_another_engine_s_times_until_one_is_made_here() -> None:
    tiers = in_host_memory()
    Engine(tiers=tiers).ask("a", 3, "x", 4)
    engine = Engine(tiers=tiers)
    engine.ask("a", 3, "x", 4)
    engine.ask("b", 5, "x", 4)
    tiers.close()
    assert engine.counted(ENCODED, HOST.hits, DEVICE.hits, DEVICE.saved_seconds) == [0, 1, 1, pytest.approx(0.01)]


def test_embeddings_that_a_nearer_tier_lost_are_reported_with_the_tier_that_gave_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = partial(entry_key, model_digest="model", processor="", dtype="fake")
    width, near, far = 48 // TOKENS_PER_PICTURE, FakeTier("disk"), FakeTier("remote")
    store = TieredStore(None, [near, far])
    tiers = EmbeddingTiers(store, name, EmbeddingFormat("uint8", width, width), lambda: engine.inbox.wake())
    engine = Engine(tiers=tiers, num_pictures=1)
    engine.ask("a", 3, "x", 4)
    engine.ask("b", 5, "y", 4)
    assert store.wait_written(20)
    # Like a damaged entry, it is known to be there until it is read.
    monkeypatch.setattr(near, "get", lambda _key: None)
    story = engine.ask("c", 7, "x", 4)
    tiers.close()
    assert story is not None
    assert [each.found_in for each in story.media] == ["remote"]
    assert store.hits == {"remote": 1}
    disk, remote = ENCODER["disk"], ENCODER["remote"]
    assert engine.counted(disk.queries, disk.hits, remote.queries, remote.hits) == [3, 0, 3, 1]


def test_a_tier_that_is_set_aside_is_not_queried_and_is_counted_as_such() -> None:
    disk, prefix_disk = FakeTier("disk"), FakeTier("disk")
    disk.error = prefix_disk.error = OSError("it is gone")
    limits = GuardLimits(first_pause=1000, longest_pause=1000)
    store, prefix_store = (TieredStore(None, [tier], limits=limits) for tier in (disk, prefix_disk))
    name = partial(entry_key, model_digest="model", processor="", dtype="fake")
    tiers = EmbeddingTiers(store, name, EmbeddingFormat("uint8", 1, 1), lambda: engine.inbox.wake())
    engine = Engine(tiers=tiers, prefix_store=prefix_store, blocks_per_stretch=2)
    set_aside = [SET_ASIDE["encoder", "disk"], SET_ASIDE["prefix", "disk"]]
    assert engine.counted(*set_aside) == [0, 0]
    counted = []
    for token, picture in enumerate("xyz", 1):
        engine.ask(picture, 19 * token, picture, 4)
        counted.append(engine.counted(DEVICE.queries, ENCODER["disk"].queries, PREFIX_DISK.queries))
    engine.meter.measure_tiers()
    tiers.close()
    prefix_store.close()
    assert engine.counted(*set_aside) == [1, 1]
    assert (disk.num_gets, prefix_disk.num_gets) == (1, 1)
    [first, *later] = counted
    assert (first[:2], first[2] > 0, later) == ([1, 1], True, [[2, *first[1:]], [3, *first[1:]]])


def test_pixels_that_the_engine_kept_are_hits_of_the_processor_cache() -> None:
    engine = Engine(KeptPixels(1 << 20), num_pictures=1)
    engine.ask("a", 3, "x", 4)
    engine.ask("b", 5, "y", 4)
    story = engine.ask("c", 7, "x", 4)
    assert story is not None
    assert [(each.found_in, each.was_cached) for each in story.media] == [(None, True)]
    assert engine.counted(PROCESSOR.queries, PROCESSOR.hits, PROCESSOR.entries) == [1, 1, 2]


@pytest.mark.parametrize("who_found_them_leaves", [False, True])
def test_pixels_that_the_engine_found_once_are_no_hit_when_they_are_made_anew(who_found_them_leaves: bool) -> None:
    engine = Engine(KeptPixels(1 << 20))
    engine.ask("a", 3, "x", 4)
    engine.inbox.try_put(ResetCaches("reset", prefix=True, encoder=True, processor=False))
    engine.inbox.try_put(make_request("b", 3, "x", 4))
    engine.loop.step()
    if who_found_them_leaves:
        engine.inbox.try_put(AbortRequest("b"))
    engine.step_until_answered()
    assert engine.counted(PROCESSOR.hits) == [1]
    engine.inbox.try_put(ResetCaches("reset", prefix=True, encoder=True, processor=True))
    # As a client does that knows nothing is held, so the engine need not look.
    engine.inbox.try_put(make_request("c", 3, "x", 4, coming_media=("x",)))
    engine.inbox.try_put(MediaArrived("x", pixels_like("x")))
    engine.step_until_answered()
    stories = [each for each in engine.sent if isinstance(each, RequestBegun)]
    was_cached = {story.request_id: [each.was_cached for each in story.media] for story in stories}
    assert was_cached == {"a": [False], "c": [False]} | ({} if who_found_them_leaves else {"b": [True]})


def test_hits_that_the_engine_checked_are_counted() -> None:
    engine = Engine(KeptPixels(1 << 20, verify_hits=1), num_pictures=1)
    engine.ask("a", 3, "x", 4)
    engine.ask("b", 5, "y", 4)
    engine.ask("c", 7, "x", 4)
    assert engine.counted(VERIFIED, MISMATCHED, PROCESSOR.hits) == [1, 0, 0]


def test_a_hit_whose_client_cannot_make_it_again_is_not_checked() -> None:
    engine = Engine(KeptPixels(1 << 20, verify_hits=1), num_pictures=1)
    engine.ask("a", 3, "x", 4)
    engine.ask("b", 5, "y", 4)
    story = engine.ask("c", 7, "x", 4, unsent_media=("x",))
    assert story is not None
    assert [(each.found_in, each.was_cached) for each in story.media] == [(None, True)]
    assert engine.counted(VERIFIED, PROCESSOR.hits) == [0, 1]


def test_held_entries_are_counted_before_the_end_of_an_answer_is_sent() -> None:
    engine = Engine()
    engine.ask("a", 3, "x", 4)
    held = engine.scheduler.kv_cache.pool.num_findable
    assert engine.counted(PREFIX.entries, PREFIX.num_bytes, BLOCKS_IN_USE, RUNNING) == [held, held * 100, 0, 0]
    embeddings = engine.scheduler.media.encoder_cache
    assert engine.counted(DEVICE.entries, DEVICE.num_bytes, DEVICE.budget_bytes) == [
        1,
        embeddings.num_bytes,
        embeddings.max_bytes,
    ]
    assert engine.counted(BLOCKS, PREFIX.budget_bytes) == [64, 6400]


def test_without_a_prefix_cache_no_queries_are_counted_and_it_has_no_room() -> None:
    engine = Engine(caches_prefixes=False)
    for request_id in "ab":
        engine.ask(request_id, 9)
    assert engine.counted(PREFIX.queries, PREFIX.hits, PREFIX.entries, PREFIX.budget_bytes) == [0, 0, 0, 0]
    assert engine.counted(BLOCKS) == [64]


def test_an_answer_ending_as_another_request_comes_is_counted_before_it_is_sent() -> None:
    engine = Engine()
    engine.meter._clock = lambda: 1.0
    engine.inbox.try_put(make_request("a", 3, max_tokens=2))
    engine.loop.step()
    engine.inbox.try_put(make_request("b", 5, max_tokens=2))
    engine.loop.step()
    assert [each.request_id for each in engine.sent if isinstance(each, TokenOutput) and each.finish_reason] == ["a"]
    kv = engine.scheduler.kv_cache
    assert engine.counted(PREFIX.queries, PREFIX.entries) == [kv.num_queried_tokens, kv.pool.num_findable]


def test_waiting_requests_are_counted_as_well_as_running_ones() -> None:
    engine = Engine(max_num_seqs=1)
    for request_id in "abc":
        engine.inbox.try_put(make_request(request_id, 3, max_tokens=9))
    engine.loop.step()
    assert engine.counted(RUNNING, WAITING) == [1, 2]


def test_numbers_are_copied_while_nothing_comes_or_ends() -> None:
    engine = Engine()
    engine.scheduler.pages.num_preemptions = 3
    for _ in range(110):  # more than a tenth of a second
        engine.compute(0.0, 1)
    assert engine.counted(PREEMPTIONS) == [3]


def test_guesses_are_counted_and_those_that_were_right() -> None:
    counts = []
    for guess_up_to in (0, 8):
        engine = Engine(guess_up_to=guess_up_to)
        engine.inbox.try_put(make_request("a", 9, max_tokens=60, ignore_eos=True))
        num_steps = 0
        while not any(isinstance(each, TokenOutput) and each.finish_reason for each in engine.sent):
            engine.loop.step()
            num_steps += 1
        counts.append((num_steps, *engine.counted(GUESSED, GUESSED_RIGHTLY)))
    (plain_steps, *none), (steps, guessed, right) = counts
    assert none == [0, 0]
    assert guessed == sum(piece.guess is not None for plan in engine.runner.plans for piece in plan.now)
    assert 0 < right == plain_steps - steps < guessed


def test_evictions_are_counted() -> None:
    pixels = KeptPixels(pixels_like("x").nbytes)
    engine = Engine(pixels, num_blocks=10, num_pictures=1)
    for request_id, picture in ("a", "x"), ("b", "y"), ("c", "z"):
        engine.ask(request_id, 3, picture, 12)
    blocks = engine.scheduler.kv_cache.pool.num_evicted
    assert blocks > 0
    assert engine.counted(PROCESSOR.evictions, DEVICE.evictions, PREFIX.evictions) == [2, 2, blocks]


def test_pins_are_counted() -> None:
    engine = Engine()
    engine.ask("a", 3, "x", 4, pins=(PromptPin(9, 60),))
    embeddings = engine.scheduler.media.encoder_cache.num_bytes
    assert engine.counted(BLOCKS_PINNED, EMBEDDINGS_PINNED) == [2, embeddings]


def test_states_of_recurrent_layers_are_counted() -> None:
    engine = Engine(num_state_slots=3)
    for number in range(3):
        engine.ask(str(number), 12, cache_salt=str(number))
    # The third sequence took the last free slot for itself, and that of the first one's kept state for its own.
    assert engine.counted(STATES_KEPT, STATES_EVICTED) == [2, 1]


def test_refused_failed_or_aborted_requests_are_not_reported() -> None:
    engine = Engine()
    assert engine.ask("long", 500) is None
    engine.runner.bad_media.add("bad")
    assert engine.ask("failing", 3, "bad", 4) is None
    assert isinstance(engine.sent[-1], RequestFailed)
    engine.inbox.try_put(make_request("left", 3, "x", 4))
    engine.inbox.try_put(AbortRequest("left"))
    assert engine.ask("b", 2) is not None
    assert engine.counted(ENCODED) == [0]


def test_the_beginning_of_the_first_choice_is_reported() -> None:
    story = Engine().ask("a", 3, "x", 4, n=3, temperature=1.0)
    assert story is not None
    assert [each.found_in for each in story.media] == [None]


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_a_request_of_several_choices_is_counted_as_one_that_has_a_single_choice(caches_prefixes: bool) -> None:
    slots = (DEVICE.queries, DEVICE.hits, PREFIX.queries, PREFIX.hits, ENCODED)
    counted = []
    for num_choices in (1, 3):
        # With one seat, a choice has ended before the next begins.
        engine = Engine(caches_prefixes=caches_prefixes, max_num_seqs=1)
        for request_id, num_tokens in (("a", 3), ("b", 3), ("c", 5)):
            engine.ask(request_id, num_tokens, "x", 4, n=num_choices, temperature=1.0, max_tokens=1)
        counted.append(engine.counted(*slots))
    assert counted[0] == counted[1]
