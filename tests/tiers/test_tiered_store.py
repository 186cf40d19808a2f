"""Each load is answered once and in time, whatever the tiers do; loading and storing never block the caller."""

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import TierError
from keepsight.tiers import tiered_store
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.redis_tier import RedisTier
from keepsight.tiers.tier import OnDrop, StoredArray, Tier, ignore_drop
from keepsight.tiers.tier_guard import GuardLimits
from keepsight.tiers.tiered_store import TieredStore
from tests.tiers.arrays import array_of, assert_equal, key_of
from tests.tiers.fake_tier import FakeTier
from tests.tiers.redis_servers import REAL, real_server
from tests.wait_until import wait_until

LONG = 60.0
Make = Callable[..., TieredStore]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[TieredStore] = []

    def make(
        *others: Tier, host: HostTier | None = None, max_waiting_bytes: int = 10**6, on_drop: OnDrop = ignore_drop
    ) -> TieredStore:
        limits = GuardLimits(first_pause=0.001, longest_pause=0.01)
        made.append(TieredStore(host, others, max_waiting_bytes=max_waiting_bytes, on_drop=on_drop, limits=limits))
        return made[-1]

    yield make
    for store in made:
        store.check_invariants()
        store.close()


class Loader:
    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.answers: queue.Queue[tuple[str, StoredArray | None, str | None]] = queue.Queue()

    def load(self, number: int, seconds: float = LONG) -> StoredArray | None:
        self.start_load(number, seconds)
        return self.answers.get(timeout=20)[1]

    def start_load(self, number: int, seconds: float = LONG) -> None:
        key = key_of(number)
        self.store.load(key, seconds, lambda *answer: self.answers.put((key, *answer)))


def test_host_memory_answers_at_once_on_the_caller_s_thread(make: Make) -> None:
    store = make(host=HostTier(10**6))
    store.store(key_of(1), array_of(1))
    threads: list[threading.Thread] = []
    store.load(key_of(1), LONG, lambda *_: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
    assert store.hits == {"host": 1}


def test_stored_entries_reach_every_tier_and_a_new_store_finds_them(make: Make, tmp_path: Path) -> None:
    store = make(DiskTier(tmp_path, 10**6), far := FakeTier("remote"), host=HostTier(10**6))
    store.store(key_of(1), array_of(1))
    assert store.wait_written(20)
    assert_equal(far.entries[key_of(1)], array_of(1))
    again = make(DiskTier(tmp_path, 10**6))
    assert_equal(Loader(again).load(1), array_of(1))
    assert again.hits == {"disk": 1}


def test_a_hit_in_a_far_tier_is_put_into_all_nearer_ones(make: Make) -> None:
    near, far, host = FakeTier(), FakeTier("remote"), HostTier(10**6)
    far.entries[key_of(1)] = array_of(1)
    store = make(near, far, host=host)
    assert_equal(Loader(store).load(1), array_of(1))
    assert store.wait_written(20)
    assert key_of(1) in near.entries
    assert store.find(key_of(1)) == "host"
    assert_equal(Loader(store).load(1), array_of(1))
    assert store.hits == {"remote": 1, "host": 1}


def test_an_entry_in_no_tier_is_a_miss(make: Make) -> None:
    store = make(FakeTier(), FakeTier("remote"), host=HostTier(10**6))
    assert store.find(key_of(1)) is None
    assert Loader(store).load(1) is None
    assert not store.hits


def test_all_tiers_known_to_hold_an_entry_are_listed_nearest_first(make: Make) -> None:
    near, far = FakeTier(), FakeTier("remote")
    store = make(near, far, host=HostTier(10**6))
    store.store(key_of(1), array_of(1))
    assert store.wait_written(20)
    assert store.list_holders(key_of(1)) == ("host", "disk", "remote")
    del near.entries[key_of(1)]
    assert store.list_holders(key_of(1)) == ("host", "remote")
    far.is_known = False
    assert store.list_holders(key_of(1)) == ("host",)
    assert store.list_holders(key_of(2)) == ()
    assert near.num_gets == far.num_gets == 0


def test_concurrent_loads_of_one_key_cause_one_read_and_are_all_answered(make: Make) -> None:
    tier = FakeTier()
    tier.entries[key_of(1)] = array_of(1)
    tier.may_read.clear()
    loader = Loader(make(tier))
    for _ in range(100):
        loader.start_load(1)
    tier.may_read.set()
    for _ in range(100):
        assert_equal(loader.answers.get(timeout=20)[1], array_of(1))
    assert tier.num_gets == 1


def pretend_slow(store: TieredStore) -> None:
    """Let reads of the first tier seem to take longer than `LONG / 2` seconds."""
    for _ in range(4):
        store._workers[0]._pace.note(LONG)


def test_a_read_that_would_take_longer_than_recomputing_is_not_begun(make: Make) -> None:
    tier = FakeTier()
    tier.entries[key_of(1)] = array_of(1)
    store = make(tier)
    pretend_slow(store)
    tier.may_read.clear()
    for _ in range(3):
        assert Loader(store).load(1, LONG / 2) is None
    tier.may_read.set()
    assert_equal(Loader(store).load(1, 2 * LONG), array_of(1))
    assert tier.num_gets == 2, "the first entry is read though nobody waits, to see how long it takes now"


def test_a_tier_that_has_become_faster_is_asked_again(make: Make) -> None:
    tier = FakeTier()
    tier.entries[key_of(1)] = array_of(1)
    store = make(tier)
    pretend_slow(store)
    assert Loader(store).load(1, LONG / 2) is None
    wait_until(lambda: tier.num_gets)
    assert Loader(store).load(2, 2 * LONG) is None
    assert_equal(Loader(store).load(1, LONG / 2), array_of(1))


def test_what_waits_to_be_written_is_found_though_the_tier_is_slow(make: Make) -> None:
    tier = FakeTier()
    tier.may_write.clear()
    store = make(tier)
    store.store(key_of(1), array_of(1))
    pretend_slow(store)
    assert_equal(Loader(store).load(1, LONG / 2), array_of(1))
    tier.may_write.set()


def test_a_read_that_takes_longer_than_recomputing_is_dropped(make: Make) -> None:
    tier = FakeTier()
    tier.entries[key_of(1)] = array_of(1)
    tier.may_read.clear()
    store = make(tier)
    loader = Loader(store)
    assert loader.load(1, 0.001) is None
    tier.may_read.set()
    # The same thread reads this one after the late one.
    assert_equal(loader.load(1), array_of(1))
    assert loader.answers.empty()


def test_a_read_is_waited_for_as_long_as_its_most_patient_caller_allows(make: Make) -> None:
    tier = FakeTier()
    tier.entries[key_of(1)] = array_of(1)
    tier.may_read.clear()
    loader = Loader(make(tier))
    loader.start_load(1, 0.05)
    loader.start_load(1)
    loader.start_load(1, 0.05)
    # Late after both short limits.
    assert loader.load(2, 0.1) is None
    tier.may_read.set()
    for _ in range(3):
        assert_equal(loader.answers.get(timeout=20)[1], array_of(1))


def test_loads_that_timed_out_are_not_read(make: Make) -> None:
    tier = FakeTier()
    tier.may_read.clear()
    loader = Loader(make(tier))
    loader.start_load(1)
    assert loader.load(2, 0.001) is None
    tier.may_read.set()
    assert loader.load(3) is None
    assert tier.num_gets <= 2


def test_entries_queued_for_writing_are_found(make: Make) -> None:
    tier = FakeTier()
    tier.may_write.clear()
    store = make(tier)
    for number in range(3):
        store.store(key_of(number), array_of(number))
    for number in range(3):
        assert store.find(key_of(number)) == "disk"
        assert_equal(Loader(store).load(number), array_of(number))
    assert tier.num_gets == 0
    tier.may_write.set()


def test_a_full_write_queue_drops_the_oldest_entry_and_reports_it(make: Make) -> None:
    tier, reported = FakeTier(), list[str]()
    tier.may_write.clear()
    store = make(tier, max_waiting_bytes=10_000, on_drop=reported.append)
    for number in range(20):
        store.store(key_of(number), array_of(number))
        store.check_invariants()
    store.store(key_of(99), array_of(99, 20_000))
    tier.may_write.set()
    assert store.wait_written(20)
    assert set(tier.entries) >= {key_of(number) for number in (17, 18, 19)}
    assert len(tier.entries) + store.num_left_out["disk"] == 21
    assert sorted(reported) == sorted({key_of(number) for number in range(20)} - tier.entries.keys())
    assert key_of(99) not in tier.entries


def test_a_full_write_queue_with_keeps_first_drops_new_entries() -> None:
    tier = FakeTier()
    tier.may_write.clear()
    store = TieredStore(None, [tier], max_waiting_bytes=10_000, keeps_first=True)
    for number in range(20):
        store.store(key_of(number), array_of(number))
        store.check_invariants()
        assert tier.is_writing.wait(20)  # Otherwise the first entry could leave the queue later and free room.
    tier.may_write.set()
    assert store.wait_written(20)
    assert set(tier.entries) == {key_of(number) for number in range(len(tier.entries))}
    assert store.num_left_out["disk"] == 20 - len(tier.entries) > 0
    store.close()


def test_uses_are_noted_after_queued_writes(make: Make) -> None:
    tier = FakeTier()
    tier.may_write.clear()
    store = make(tier)
    for number in range(4):
        store.store(key_of(number), array_of(number))
    assert tier.is_writing.wait(20)
    # Number 0 is being written; number 2 is still queued and moves to the end of the queue.
    for number in (9, 0, 2):
        store.note_use(key_of(number))
        store.check_invariants()
    tier.may_write.set()
    assert store.wait_written(20)
    assert list(tier.entries) == [key_of(number) for number in (0, 1, 3, 2)]
    assert tier.uses == [key_of(9), key_of(0)]


def test_noting_a_use_does_not_bring_back_a_tier_that_fails(make: Make) -> None:
    tier = FakeTier()
    tier.error = OSError("gone")
    tier.may_write.clear()
    store = make(tier)
    store.store(key_of(0), array_of(0))
    assert tier.is_writing.wait(20)
    store.note_use(key_of(1))
    assert Loader(store).load(1) is None
    # The pause is soon over, and only reads and writes tell whether the tier works again.
    wait_until(lambda: not store.list_unasked())
    store.note_use(key_of(2))
    tier.may_write.set()
    assert store.wait_written(20)
    assert store.why_unused()["disk"] == "OSError: gone"
    assert not tier.uses


@pytest.mark.parametrize("error", [OSError("gone"), ZeroDivisionError("our own fault"), None])
def test_entries_that_a_tier_did_not_take_are_counted_and_reported(
    make: Make, error: Exception | None, tmp_path: Path
) -> None:
    tier, reported = FakeTier(), list[str]()
    tier.error = error
    store = make(tier if error else DiskTier(tmp_path, 1000), FakeTier("remote"), on_drop=reported.append)
    store.store(key_of(1), array_of(1))
    assert store.wait_written(20)
    assert store.num_left_out == {"disk": 1, "remote": 0}
    assert reported == [key_of(1)]


def test_refused_entries_are_reported_like_evicted_ones(make: Make, tmp_path: Path) -> None:
    reported = list[str]()
    host, disk = HostTier(4000, on_drop=reported.append), DiskTier(tmp_path, 64, on_drop=reported.append)
    store = make(disk, host=host, on_drop=reported.append)
    for number in range(2):
        store.store(key_of(number), array_of(number))
        assert store.wait_written(20)
    assert reported == [key_of(0), key_of(0), key_of(1)]


@pytest.mark.parametrize("error", [OSError("gone"), TierError("nonsense"), ZeroDivisionError("our own fault")])
def test_a_failing_tier_is_skipped_until_it_recovers(make: Make, error: Exception) -> None:
    near, far = FakeTier(), FakeTier("remote")
    far.entries = {key_of(number): array_of(number) for number in range(40)}
    near.error = error
    store = make(near, far)
    loader = Loader(store)
    assert_equal(loader.load(1), array_of(1))
    assert_equal(loader.load(2), array_of(2))
    assert store.why_unused()["disk"] is not None
    assert store.why_unused()["remote"] is None
    near.error = None
    near.entries = {key_of(100): array_of(100)}
    came_back = threading.Event()
    for _ in range(2000):
        if loader.load(100) is not None:
            came_back.set()
            break
    assert came_back.is_set()
    assert store.why_unused()["disk"] is None


def test_an_unusable_tier_is_paused_before_the_first_request(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = make(DiskTier(tmp_path / "file" / "folder", 10**6), FakeTier("remote"))
    wait_until(lambda: store.why_unused()["disk"] is not None)
    assert "NotADirectoryError" in str(store.why_unused()["disk"])
    assert store.why_unused()["remote"] is None


def test_a_hanging_tier_delays_neither_callers_nor_keys_found_in_nearer_tiers(make: Make) -> None:
    tier = FakeTier()
    tier.may_read.clear()
    tier.may_write.clear()
    store = make(tier, host=HostTier(10**6))
    loader = Loader(store)
    for number in range(2000):
        store.store(key_of(number), array_of(number, 100))
        loader.start_load(number + 5000, 0.001)
    answered = [loader.answers.get(timeout=20) for _ in range(2000)]
    assert all(array is None for _, array, _ in answered)
    assert_equal(loader.load(1999), array_of(1999, 100))
    tier.may_read.set()
    tier.may_write.set()


def test_clearing_empties_every_tier(make: Make) -> None:
    tier = FakeTier()
    store = make(tier, host=HostTier(10**6))
    for number in range(5):
        store.store(key_of(number), array_of(number))
    store.clear()
    assert store.wait_written(20)
    assert not tier.entries
    assert store.find(key_of(1)) is None


def test_an_entry_being_written_during_a_clear_is_not_found(make: Make) -> None:
    tier = FakeTier()
    tier.may_write.clear()
    store = make(tier)
    store.store(key_of(1), array_of(1))
    assert tier.is_writing.wait(20)
    store.clear()
    assert store.find(key_of(1)) is None
    assert Loader(store).load(1) is None
    tier.may_write.set()
    assert store.wait_written(20)
    assert not tier.entries


def test_an_entry_read_before_a_clear_is_not_promoted_after_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = FakeTier(), FakeTier("remote")
    far.entries[key_of(1)] = array_of(1)
    store = make(near, far, host=HostTier(10**6))
    promote, is_cleared, is_promoted = store._promote, threading.Event(), threading.Event()

    def promote_later(*arguments: Any) -> None:
        assert is_cleared.wait(20)
        promote(*arguments)
        is_promoted.set()

    monkeypatch.setattr(store, "_promote", promote_later)
    assert_equal(Loader(store).load(1), array_of(1))
    store.clear()
    is_cleared.set()
    assert is_promoted.wait(20)
    assert store.wait_written(20)
    assert store.find(key_of(1)) is None


def test_clearing_does_not_wait_while_a_found_entry_is_moved_in_host_memory(make: Make) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    moved = list[StoredArray]()

    def move(array: StoredArray) -> StoredArray:
        has_begun.set()
        may_end.wait(20)
        moved.append(array)
        return array

    far = FakeTier()
    far.entries[key_of(1)] = array_of(1)
    store = make(far, host=HostTier(10**6, move=move))
    assert_equal(Loader(store).load(1), array_of(1))
    assert has_begun.wait(20)
    store.clear()
    assert not moved, "it waited"
    may_end.set()
    # Read by the same thread, after the entry was moved.
    assert Loader(store).load(2) is None
    assert store.find(key_of(1)) is None


def test_closing_answers_all_waiting_loads(make: Make) -> None:
    tier = FakeTier()
    tier.may_read.clear()
    store = make(tier)
    loader = Loader(store)
    for number in range(5):
        loader.start_load(number)
    closing = threading.Thread(target=store.close)
    closing.start()
    for _ in range(4):
        assert loader.answers.get(timeout=20)[1] is None
    tier.may_read.set()
    assert loader.answers.get(timeout=20)[1] is None
    closing.join(20)
    assert not closing.is_alive()


@pytest.mark.skipif(REAL is None, reason="NO REAL REDIS: redis-server is not installed")
def test_a_real_redis_serves_a_second_store_and_may_be_killed_at_any_moment(make: Make) -> None:
    with real_server() as (url, process):
        first = make(RedisTier(url), max_waiting_bytes=10**8)
        for number in range(20):
            first.store(key_of(number), array_of(number, 1_000_000))
        assert first.wait_written(20)
        loader = Loader(make(RedisTier(url)))
        for number in range(10):
            assert_equal(loader.load(number), array_of(number, 1_000_000))
        for number in range(10, 20):
            loader.start_load(number)
        process.kill()
        for _ in range(10):
            key, array, _ = loader.answers.get(timeout=20)
            expected = next(array_of(number, 1_000_000) for number in range(10, 20) if key_of(number) == key)
            assert array is None or array == expected
        process.wait(20)
        assert loader.load(1) is None
        assert loader.store.why_unused()["remote"] is not None


def test_stats_cover_every_tier(make: Make, tmp_path: Path) -> None:
    store = make(DiskTier(tmp_path, 10**6), host=HostTier(10**6))
    store.store(key_of(1), array_of(1))
    assert store.wait_written(20)
    stats = store.stats()
    assert (stats["host"].num_entries, stats["disk"].num_entries) == (1, 1)
    assert (stats["host"].num_bytes, stats["disk"].num_bytes) == (3000, 4096)


def test_closing_does_not_wait_for_a_tier_that_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_store, "_CLOSING_SECONDS", 1000 * LONG)
    tier = FakeTier()

    def clear() -> None:
        raise OSError("unreachable")

    tier.clear = clear  # type: ignore[method-assign]
    store = TieredStore(None, [tier], limits=GuardLimits(first_pause=1000 * LONG, longest_pause=1000 * LONG))
    store.clear()
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_a_tier_that_failed_to_clear_returns_nothing_until_cleared() -> None:
    tier = FakeTier()
    tier.entries[key_of(1)] = array_of(1)
    may_clear = threading.Event()

    def clear() -> None:
        if not may_clear.is_set():
            raise OSError("not now")
        tier.entries.clear()

    tier.clear = clear  # type: ignore[method-assign]
    store = TieredStore(None, [tier], limits=GuardLimits(first_pause=0.01))
    store.clear()
    found = queue.SimpleQueue[StoredArray | None]()
    store.load(key_of(1), 20, lambda array, _: found.put(array))
    assert found.get(timeout=20) is None
    assert store.find(key_of(1)) is None
    may_clear.set()
    assert store.wait_written(20)
    assert tier.entries == {}
    store.close()


def test_a_disk_that_never_returns_does_not_hold_up_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.tiers.tiered_store._CLOSING_SECONDS", 0.05)
    is_reserving, may_return = threading.Event(), threading.Event()
    real = os.posix_fallocate

    def hang(*arguments: int) -> None:
        is_reserving.set()
        assert may_return.wait(60)
        real(*arguments)

    store = TieredStore(None, [DiskTier(tmp_path, 10**6)])
    assert store.wait_opened(20)
    monkeypatch.setattr("keepsight.tiers.disk_tier.os.posix_fallocate", hang)
    store.store(key_of(1), array_of(1))
    assert is_reserving.wait(20)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(20)
    is_closed = not closing.is_alive()
    may_return.set()
    closing.join()
    assert is_closed
