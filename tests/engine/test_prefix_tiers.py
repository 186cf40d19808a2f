"""Kept stretches come back in order, as far as they go, and every load ends whatever a tier does."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from keepsight.engine.prefix_tiers import (
    LOADS_AT_ONCE,
    STRETCHES_AT_ONCE,
    LoadedStretches,
    PrefixTiers,
    StretchFormat,
)
from keepsight.scheduling.step_plan import KeptStretch
from keepsight.scheduling.stretch_loads import StretchLoad
from keepsight.tiers.entry_key import entry_key
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tiered_store import TieredStore
from tests.tiers.fake_tier import FakeTier
from tests.wait_until import wait_until

SOON = 20
PAGES = StretchFormat("uint8", (1, 8))


def stretch(number: int) -> StoredArray:
    return StoredArray("uint8", PAGES.shape, memoryview(bytes([number % 256] * 8)))


def row(length: int, first: int = 0) -> StretchLoad:
    return StretchLoad(first, tuple(b"%d" % number for number in range(first, first + length)))


def key_of(name: bytes) -> str:
    return entry_key(name.hex(), "", "", "")


def name_of(number: int) -> str:
    return key_of(b"%d" % number)


class Tiers:
    """Used the way an engine's loop uses them."""

    def __init__(self, tier: FakeTier, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_wakes = 0
        self.store = TieredStore(None, [tier])
        self.tiers = PrefixTiers(self.store, key_of, PAGES, self.wake, clock)

    def wake(self) -> None:
        self.num_wakes += 1

    def keep(self, *numbers: int) -> None:
        for number in numbers:
            self.tiers.keep(KeptStretch(b"%d" % number, ()), lambda number=number: stretch(number))  # type: ignore[misc]
        assert self.store.wait_written(SOON)

    def take_all(self, is_enough: Callable[[list[LoadedStretches]], bool]) -> list[LoadedStretches]:
        taken: list[LoadedStretches] = []

        def has_enough() -> bool:
            taken.extend(self.tiers.take_loaded())
            self.tiers.check_invariants()
            return is_enough(taken)

        wait_until(has_enough)
        return taken

    def load(self, *loads: StretchLoad) -> dict[StretchLoad, list[StoredArray]]:
        """Return the arrays that each load got, once all loads have ended."""
        for load in loads:
            self.tiers.load(load, 0.0)
        taken = self.take_all(lambda taken: sum(each.is_last for each in taken) == len(loads))
        came: dict[StretchLoad, list[StoredArray]] = {load: [] for load in loads}
        for each in taken:
            assert each.places == range(len(came[each.load]), len(came[each.load]) + len(each.arrays))
            came[each.load] += each.arrays
        return came


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def tiers(tier: FakeTier) -> Iterator[Tiers]:
    tiers = Tiers(tier)
    yield tiers
    tiers.tiers.close()


def test_a_row_comes_in_its_order_and_as_it_was_kept(tiers: Tiers) -> None:
    length = 3 * STRETCHES_AT_ONCE + 5
    tiers.keep(*range(length))
    assert tiers.load(row(length)) == {row(length): [stretch(number) for number in range(length)]}


def test_no_more_are_on_their_way_than_a_step_takes_in(tiers: Tiers, tier: FakeTier) -> None:
    tiers.keep(*range(100))
    tier.may_read.clear()
    tiers.tiers.load(row(100), 0.0)
    for _ in range(5):
        assert tiers.tiers.take_loaded() == []
    tier.may_read.set()
    wait_until(lambda: len(tiers.tiers._answers) == STRETCHES_AT_ONCE)
    assert tier.num_gets == STRETCHES_AT_ONCE
    [loaded] = tiers.tiers.take_loaded()
    assert (loaded.places, loaded.is_last) == (range(STRETCHES_AT_ONCE), False)


@pytest.mark.parametrize("gap", [0, 2, STRETCHES_AT_ONCE, 2 * STRETCHES_AT_ONCE - 1])
def test_a_load_ends_before_the_first_missing_stretch(tiers: Tiers, gap: int) -> None:
    length = 2 * STRETCHES_AT_ONCE
    tiers.keep(*(number for number in range(length) if number != gap))
    assert [len(came) for came in tiers.load(row(length)).values()] == [gap]


def test_the_first_of_unknown_stretches_is_read_because_another_server_may_have_put_it(
    tiers: Tiers, tier: FakeTier
) -> None:
    assert tiers.load(row(30)) == {row(30): []}
    assert tier.num_gets == 1


def test_stretches_another_server_put_there_meanwhile_are_found(tiers: Tiers, tier: FakeTier) -> None:
    tiers.keep(*range(5))
    tier.is_known = False
    assert tiers.load(row(7)) == {row(7): [stretch(number) for number in range(5)]}


def test_the_first_of_a_row_that_was_read_counts_as_used_last(tiers: Tiers, tier: FakeTier) -> None:
    tiers.keep(*range(4))
    tiers.load(row(6))
    assert tiers.store.wait_written(SOON)
    assert tier.uses == [name_of(number) for number in (3, 2, 1, 0)]


def test_the_first_of_a_row_that_was_extended_counts_as_used_last(tiers: Tiers, tier: FakeTier) -> None:
    tiers.keep(0, 1)
    tiers.tiers.keep(KeptStretch(b"2", (), behind=(b"0", b"1")), lambda: stretch(2))
    assert tiers.store.wait_written(SOON)
    assert tier.uses == [name_of(1), name_of(0)]


def test_a_row_is_waited_for_no_longer_than_computing_it_would_take(tier: FakeTier) -> None:
    now = 0.0
    tiers = Tiers(tier, clock=lambda: now)
    tiers.keep(*range(100))
    tiers.tiers.load(row(100), 5.0)
    tiers.take_all(lambda taken: sum(len(each.arrays) for each in taken) >= STRETCHES_AT_ONCE)
    now = 6.0
    taken = tiers.take_all(lambda taken: bool(taken) and taken[-1].is_last)
    assert taken[-1].places.stop < 100
    tiers.tiers.close()


def test_many_loads_are_all_answered_some_at_a_time(tiers: Tiers) -> None:
    tiers.keep(*range(40))
    loads = [row(3, first) for first in range(3 * LOADS_AT_ONCE)] + [row(2, 100), row(60, 20)]
    came = tiers.load(*loads)
    assert {load: len(arrays) for load, arrays in came.items()} == {
        **dict.fromkeys(loads[:-2], 3),
        row(2, 100): 0,
        row(60, 20): 20,
    }


def test_some_of_too_many_loads_wait_and_each_wakes_the_loop(tiers: Tiers, tier: FakeTier) -> None:
    tiers.keep(*range(40))
    tier.may_read.clear()
    loads = [row(3, first) for first in range(LOADS_AT_ONCE + 3)]
    for load in loads:
        tiers.tiers.load(load, SOON)
    assert tiers.tiers.take_loaded() == []
    assert len(tiers.tiers._readings) == LOADS_AT_ONCE
    tier.may_read.set()
    num_ended = 0
    while num_ended < len(loads):
        wait_until(lambda: tiers.tiers.has_work)
        num_ended += sum(loaded.is_last for loaded in tiers.tiers.take_loaded())
    assert tiers.num_wakes > 0


def test_a_load_not_requested_yet_keeps_the_loop_awake_unless_too_many_are_under_way(
    tiers: Tiers, tier: FakeTier
) -> None:
    tier.may_read.clear()
    for number in range(LOADS_AT_ONCE + 1):
        tiers.tiers.load(row(3, number), SOON)
        assert tiers.tiers.has_work is (number < LOADS_AT_ONCE)
        tiers.tiers.take_loaded()
        assert not tiers.tiers.has_work
    tier.may_read.set()


def test_a_load_slower_than_computing_is_given_up(tiers: Tiers, tier: FakeTier) -> None:
    tiers.keep(*range(3))
    tier.may_read.clear()
    tiers.tiers.load(row(3), 1e-6)
    taken = tiers.take_all(lambda taken: bool(taken))
    tier.may_read.set()
    assert taken == [LoadedStretches(row(3), range(0), (), is_last=True)]


def test_after_clear_nothing_kept_or_asked_for_before_arrives(tiers: Tiers, tier: FakeTier) -> None:
    tiers.keep(*range(LOADS_AT_ONCE * 3))
    tier.may_read.clear()
    loads = [row(3, first) for first in range(LOADS_AT_ONCE + 2)]
    for load in loads:
        tiers.tiers.load(load, SOON)
    tiers.tiers.take_loaded()
    tiers.tiers.clear()
    tier.may_read.set()
    taken = tiers.take_all(lambda taken: len(taken) == len(loads))
    assert all(not each.arrays and each.is_last for each in taken)
    assert tiers.load(row(3)) == {row(3): []}


def test_stretches_already_kept_are_not_read_from_the_device_again(tiers: Tiers) -> None:
    tiers.keep(1)
    tiers.tiers.keep(KeptStretch(b"1", ()), lambda: pytest.fail("it was read"))


def test_a_stretch_of_another_shape_is_ignored(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    tiers.tiers.keep(KeptStretch(b"0", ()), lambda: StoredArray("uint8", (8,), memoryview(bytes(8))))
    assert tiers.store.wait_written(SOON)
    assert tiers.load(row(1)) == {row(1): []}
    assert "instead of uint8 (1, 8): ignored" in caplog.text


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a fault of our own")])
def test_a_tier_that_fails_ends_every_load(tiers: Tiers, tier: FakeTier, error: Exception) -> None:
    tiers.keep(*range(3))
    tier.error = error
    assert tiers.load(row(3)) == {row(3): []}
    [status] = tiers.tiers.status()
    assert (status.cache, status.name, status.reason is None) == ("prefix", "disk", False)


class ClosedTier(FakeTier):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.may_open, self.opening_error = threading.Event(), error

    def open(self) -> None:
        assert self.may_open.wait(SOON)
        if self.opening_error is not None:
            raise self.opening_error


@pytest.mark.parametrize("error", [None, OSError("no such folder")])
def test_an_engine_waits_until_it_is_known_what_was_kept_before(error: Exception | None) -> None:
    tier = ClosedTier(error)
    tiers = Tiers(tier)
    threading.Timer(0.05, tier.may_open.set).start()
    tiers.tiers.wait_opened()
    assert tier.may_open.is_set()
    tiers.tiers.close()


def test_an_engine_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tier = ClosedTier()
    tiers = Tiers(tier)
    monkeypatch.setattr("keepsight.engine.prefix_tiers.OPENING_SECONDS", 0.01)
    tiers.tiers.wait_opened()
    assert "stored prefixes are not known yet" in caplog.text
    tier.may_open.set()
    tiers.tiers.close()
