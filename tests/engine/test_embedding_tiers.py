"""Between an engine and real tiers: entries kept, found, late, cleared and held. No model is computed."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.engine.embedding_tiers import MAX_UNRECORDED_USES, EmbeddingFormat, EmbeddingTiers
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import EngineRequest
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.embedding_loads import Load
from keepsight.scheduling.step_plan import Encoding
from keepsight.tiers.entry_key import entry_key
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tier_guard import GuardLimits
from keepsight.tiers.tiered_store import TieredStore
from keepsight.tiers.trace import TraceRecorder, read_trace
from tests.clock import Clock
from tests.tiers.any_order import check_any_order
from tests.tiers.fake_tier import FakeTier

SOON = 20
NUM_TOKENS, WIDTH = 4, 8
EMBEDDINGS = EmbeddingFormat("float32", WIDTH, 4 * WIDTH)


def array_of(number: int, num_tokens: int = NUM_TOKENS) -> StoredArray:
    return StoredArray("float32", (num_tokens, WIDTH), memoryview(bytes([number]) * (4 * WIDTH * num_tokens)), 0.01)


def name(encoder_key: str) -> str:
    return entry_key(encoder_key, "model", "processor", "float32")


def load(key: str) -> Load:
    return Load(key, f"media of {key}", NUM_TOKENS)


def encoding(key: str) -> Encoding:
    return Encoding(key, f"media of {key}", NUM_TOKENS)


class Bench:
    """Host memory with room for two entries, and a far tier that can be made to misbehave."""

    def __init__(self) -> None:
        dropped: deque[str] = deque()
        self.far = FakeTier()
        host = HostTier(2 * array_of(0).num_bytes, "lru", on_drop=dropped.append)
        limits = GuardLimits(first_pause=0, longest_pause=0)
        self.store = TieredStore(host, [self.far], on_drop=dropped.append, limits=limits)
        self.woken = threading.Semaphore(0)
        self.tiers = EmbeddingTiers(self.store, name, EMBEDDINGS, self.woken.release, dropped=dropped)

    def keep(self, *keys: str) -> None:
        for number, key in enumerate(keys):
            self.tiers.keeping()(encoding(key), 0.01, lambda number=number: array_of(number))  # type: ignore[misc]

    def find(self, key: str) -> StoredArray | None:
        self.tiers.load(load(key))
        while not self.tiers.has_work:  # a tier that was cleared wakes, too
            assert self.woken.acquire(timeout=SOON)
        [(found, array, _)] = self.tiers.take_loaded()
        assert found == key
        return array


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.tiers.close()


def test_encoded_embeddings_are_found_at_once_in_host_memory(bench: Bench) -> None:
    bench.keep("a")
    bench.tiers.load(load("a"))
    assert bench.tiers.has_work
    [(_, array, _)] = bench.tiers.take_loaded()
    assert array is not None
    assert bytes(array.payload) == bytes(array_of(0).payload)
    assert not bench.woken.acquire(blocking=False)


def test_entries_evicted_from_host_memory_are_found_farther_away_and_wake_the_loop(bench: Bench) -> None:
    bench.keep("a", "b", "c")
    assert bench.store.wait_written(SOON)
    assert bench.find("a") is not None
    assert [(tier.name, tier.num_hits) for tier in bench.tiers.status()] == [("host", 0), ("disk", 1)]


def test_failed_writes_show_in_a_tier_s_status(bench: Bench) -> None:
    bench.far.error = OSError("the disk is full")
    bench.keep("a")
    assert bench.store.wait_written(SOON)
    assert [(tier.name, tier.num_left_out) for tier in bench.tiers.status()] == [("host", 0), ("disk", 1)]


def test_a_tier_holds_several_embeddings_only_if_it_holds_each_of_them(bench: Bench) -> None:
    bench.keep("a", "b", "c")
    assert bench.store.wait_written(SOON)
    assert bench.tiers.list_holders(["b", "c"]) == ("host", "disk")
    assert bench.tiers.list_holders(["a", "c"]) == ("disk",)
    assert bench.tiers.list_holders(["c", "d"]) == ()
    assert bench.far.num_gets == 0


def test_an_entry_that_was_never_kept_is_not_found(bench: Bench) -> None:
    assert bench.find("a") is None


def test_an_entry_of_another_shape_is_ignored(bench: Bench) -> None:
    bench.store.store(name("a"), array_of(1, num_tokens=3))
    assert bench.find("a") is None


def test_a_slow_read_is_waited_for_if_what_it_brings_cannot_be_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.engine.embedding_tiers.PIXEL_SECONDS", 0)
    bench.keep("a", "b", "c", "d")
    assert bench.store.wait_written(SOON)
    bench.far.may_read.clear()
    bench.tiers.load(load("a")._replace(can_be_made=False))
    assert bench.find("b") is None
    bench.far.may_read.set()
    assert bench.woken.acquire(timeout=SOON)
    [(key, array, _)] = bench.tiers.take_loaded()
    assert key == "a"
    assert array is not None


def test_after_clearing_nothing_is_found_that_was_kept_asked_for_or_begun_before(bench: Bench) -> None:
    keep = bench.tiers.keeping()
    bench.keep("a")
    bench.tiers.load(load("a"))
    bench.tiers.clear()
    keep(encoding("b"), 0.01, lambda: array_of(2))
    assert bench.tiers.take_loaded() == [("a", None, None)]
    assert bench.find("a") is None
    assert bench.find("b") is None


def test_media_are_held_as_long_as_a_tier_is_known_to_hold_them(bench: Bench) -> None:
    bench.keep("a", "b")
    assert bench.tiers.take_changes() == (["media of a", "media of b"], [])
    bench.keep("a")
    assert bench.tiers.take_changes() == ([], [])
    assert bench.store.wait_written(SOON)
    bench.far.clear()
    bench.keep("c")
    assert bench.tiers.take_changes() == (["media of c"], ["media of b"])
    bench.tiers.clear()
    assert bench.tiers.take_changes() == ([], ["media of a", "media of c"])


class SlowMove:
    """Moves arrays for a host tier, and takes until a test says so."""

    def __init__(self) -> None:
        self.has_begun, self.may_end, self.has_ended = (threading.Event() for _ in range(3))

    def __call__(self, array: StoredArray) -> StoredArray:
        self.has_begun.set()
        self.may_end.wait(SOON)
        self.has_ended.set()
        return array


def test_the_loop_does_not_wait_while_an_entry_is_moved_and_a_reset_meanwhile_drops_it() -> None:
    move = SlowMove()
    tiers = EmbeddingTiers(TieredStore(HostTier(10**6, move=move), []), name, EMBEDDINGS, lambda: None)
    keeping = threading.Thread(target=tiers.keeping(), args=(encoding("a"), 0.01, lambda: array_of(0)))
    keeping.start()
    assert move.has_begun.wait(SOON)
    tiers._note_place("b", "media of b")
    assert tiers.take_changes() == ([], [])
    tiers.clear()
    assert not move.has_ended.is_set(), "the loop waited"
    move.may_end.set()
    keeping.join()
    assert tiers.take_changes() == ([], [])
    tiers.load(load("a"))
    assert tiers.take_loaded() == [("a", None, None)]
    tiers.close()


def test_the_loop_does_not_wait_while_evicted_entries_are_freed(bench: Bench) -> None:
    """Unlocking their pages takes a while."""
    has_begun, may_end, has_ended = (threading.Event() for _ in range(3))

    def free(key: str, array: StoredArray) -> None:
        has_begun.set()
        may_end.wait(SOON)
        has_ended.set()

    bench.keep("a")
    bench.store.store = free  # type: ignore[method-assign]
    keeping = threading.Thread(target=bench.keep, args=("b",))
    keeping.start()
    assert has_begun.wait(SOON)
    assert bench.tiers.take_changes() == (["media of a"], [])
    assert not has_ended.is_set(), "the loop waited"
    may_end.set()
    keeping.join()


def fail(far: FakeTier) -> None:
    far.error = OSError("the disk is full")


def take_none(far: FakeTier) -> None:
    far.put = lambda *_: False  # type: ignore[method-assign]


def know_none(far: FakeTier) -> None:
    """Like a Redis server, which never says what it holds."""
    far.has = lambda key: False  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [fail, take_none, know_none])
def test_media_whose_write_to_a_tier_failed_are_not_held(bench: Bench, spoil: Callable[[FakeTier], None]) -> None:
    bench.far.may_write.clear()
    bench.keep("a", "b", "c")
    assert bench.tiers.take_changes() == (["media of a", "media of b", "media of c"], [])
    spoil(bench.far)
    bench.far.may_write.set()
    assert bench.store.wait_written(SOON)
    assert bench.tiers.take_changes() == ([], ["media of a"])


def test_media_reported_as_held_are_found_whatever_happens() -> None:
    check_any_order(_Calls, 40, 20)


class _Calls(RuleBasedStateMachine):
    """Nothing is written before `settle`, which may make the writes fail."""

    keys = "abcde"

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.bench.far.may_write.clear()
        self.held = set[str]()

    @rule(keys=st.lists(st.sampled_from(keys), min_size=1))
    def keep(self, keys: list[str]) -> None:
        self.bench.keep(*keys)

    @rule(key=st.sampled_from(keys))
    def find(self, key: str) -> None:
        self.bench.find(key)

    @rule()
    def clear(self) -> None:
        self.bench.tiers.clear()

    @invariant()
    def take_changes(self) -> None:
        kept, dropped = self.bench.tiers.take_changes()
        assert self.held.isdisjoint(kept)
        self.held |= set(kept)
        assert self.held.issuperset(dropped)
        self.held -= set(dropped)

    @rule(fails=st.booleans())
    def settle(self, fails: bool) -> None:
        self.bench.far.error = OSError("gone") if fails else None
        self.bench.far.may_write.set()
        assert self.bench.store.wait_written(SOON)
        self.bench.far.may_write.clear()
        self.take_changes()
        assert self.held <= {f"media of {key}" for key in self.keys if self.bench.store.find(name(key))}
        self.bench.tiers.check_invariants()

    def teardown(self) -> None:
        self.bench.far.may_write.set()
        self.bench.tiers.close()


def test_a_far_tier_has_as_long_as_making_all_that_is_loading_anew_would_take(bench: Bench) -> None:
    unknown = bench.tiers._patience(load("x"))
    bench.tiers.load(load("a"))
    waiting = bench.tiers._patience(load("x"))
    assert waiting > unknown
    bench.keep("b")
    assert bench.tiers._patience(load("x")) < waiting


def test_a_trace_names_each_use_by_its_entry_and_records_encoding_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "trace", Clock(1000)
    monkeypatch.setattr(time, "time", clock)
    tiers = EmbeddingTiers(TieredStore(None, []), name, EMBEDDINGS, lambda: None, trace=TraceRecorder(path))
    media = tuple(MediaItem(key, TokenSpan(4 * place, 4), Geometry(9, 9)) for place, key in enumerate("ab"))
    request = EngineRequest("r", (1,) * 8, media, SamplingParams())
    tiers.note_uses(request)
    clock.now = 2000
    tiers.keeping()(encoding("a"), 0.25, lambda: pytest.fail("nothing keeps it"))
    tiers.note_uses(request)
    tiers.close()
    uses = list(read_trace(path))
    assert [use.time for use in uses] == [1000, 1000, 2000, 2000], "not when it was known what it takes"
    assert [use.key for use in uses] == [name("a"), name("b")] * 2
    assert {(use.num_bytes, use.seconds) for use in uses} == {(4 * EMBEDDINGS.num_bytes, 0.25)}
    assert "media" not in json.dumps([use.key for use in uses])


def test_requests_without_pictures_push_no_use_out_of_the_trace(tmp_path: Path) -> None:
    tiers = EmbeddingTiers(
        TieredStore(None, []), name, EMBEDDINGS, lambda: None, trace=TraceRecorder(tmp_path / "trace")
    )
    text = EngineRequest("text", (1,), (), SamplingParams())
    tiers.note_uses(EngineRequest("r", (1,) * 4, (MediaItem("a", TokenSpan(0, 4), Geometry(9, 9)),), SamplingParams()))
    for _ in range(MAX_UNRECORDED_USES):
        tiers.note_uses(text)
    tiers.keeping()(encoding("a"), 0.25, lambda: pytest.fail("nothing keeps it"))
    tiers.note_uses(text)
    tiers.close()
    assert [use.key for use in read_trace(tmp_path / "trace")] == [name("a")]
