"""One contract for all modes: pixels arrive at the engine bit for bit, or are recognized as stale."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from keepsight.config import Config
from keepsight.engine.pixel_source import PixelSource, open_pixel_source
from keepsight.frontend.pixels.pixel_cache import PixelCache, open_pixel_cache
from keepsight.ipc.pixel_mode import PixelMode
from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.shm_ring import RingWriter
from keepsight.pixels import carry_embeddings
from keepsight.requests import CarriedPixels, MediaArrived, Pixels, RingPlace
from tests.names import name_of

MODES: tuple[PixelMode, ...] = ("none", "processor_only", "lru", "shm", "shared")
# Modes whose frontend can send pixels again that it made before.
KEEPING: tuple[PixelMode, ...] = ("processor_only", "shm", "shared")
# Modes that evict the least recently used.
BY_USE: tuple[PixelMode, ...] = ("processor_only", "shared")
MAX_BYTES = 1 << 20
SHAPE = (64, 64, 3)  # MAX_BYTES holds 64 of these in files of whole pages, and more in other modes.


def picture(number: int, shape: tuple[int, int, int] = SHAPE) -> Pixels:
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


@dataclass
class Sides:
    mode: PixelMode
    cache: PixelCache
    source: PixelSource

    def put(self, number: int) -> CarriedPixels:
        return self.cache.put(name_of(number), picture(number))

    def send(self, number: int, carried: CarriedPixels) -> Pixels | None:
        return self.source.receive(MediaArrived(name_of(number), carried))

    def arrives(self, number: int, carried: CarriedPixels) -> bool:
        got = self.send(number, carried)
        return got is not None and np.array_equal(got, picture(number))

    def is_kept(self, number: int) -> bool:
        return self.cache.read(name_of(number)) is not None


@pytest.fixture
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    with RunDirectory.create() as directory:
        config = Config(mm_processor_cache_gb=MAX_BYTES / (1 << 30))
        sides = Sides(
            request.param,
            open_pixel_cache(request.param, config, directory.path),
            open_pixel_source(request.param, config, directory.path),
        )
        yield sides
        sides.cache.check_invariants()
        sides.cache.close()
        sides.source.close()


def of(*modes: PixelMode) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("sides", modes, indirect=True)


@of(*MODES)
def test_pixels_arrive_bit_for_bit(sides: Sides) -> None:
    assert all(sides.arrives(number, sides.put(number)) for number in range(20))


@of(*MODES)
def test_pixels_that_were_never_put_are_a_miss(sides: Sides) -> None:
    sides.put(1)
    assert sides.cache.get_and_update(name_of(2)) is None
    assert sides.cache.read(name_of(2)) is None
    sides.cache.touch(name_of(2))
    sides.cache.drop(name_of(2))


@of(*KEEPING)
def test_what_was_put_is_found_and_arrives_again(sides: Sides) -> None:
    for number in range(3):
        sides.put(number)
    for number in (2, 0, 1, 1):
        carried = sides.cache.get_and_update(name_of(number))
        assert carried is not None
        assert sides.arrives(number, carried)
        read = sides.cache.read(name_of(number))
        assert read is not None
        assert np.array_equal(read, picture(number))


@of("none", "lru")
def test_a_frontend_that_keeps_nothing_finds_nothing(sides: Sides) -> None:
    sides.put(1)
    assert sides.cache.get_and_update(name_of(1)) is None
    assert not sides.is_kept(1)


@of(*KEEPING)
def test_a_known_one_is_put_again_without_room(sides: Sides) -> None:
    for _ in range(200):
        assert sides.arrives(1, sides.put(1))
        assert sides.arrives(2, sides.put(2))
    assert sides.is_kept(1)
    assert sides.is_kept(2)


@of(*MODES)
def test_one_larger_than_the_cache_is_carried_and_warned_of_once(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    large = picture(1, (1024, 1024, 3))
    sides.put(2)
    for number in (1, 3):
        arrived = sides.send(number, sides.cache.put(name_of(number), large))
        assert arrived is not None
        assert np.array_equal(arrived, large)
        assert not sides.is_kept(number)
    assert sides.is_kept(2) == (sides.mode in KEEPING)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == (sides.mode != "none")


@of("shm")
def test_a_picture_that_found_no_place_this_once_is_not_said_to_be_too_large(
    sides: Sides, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, too_large = picture(1, (512, 512, 3)), picture(2, (1024, 1024, 3))
    assert isinstance(sides.cache.put(name_of(0), large), RingPlace)
    with monkeypatch.context() as patched:
        patched.setattr(RingWriter, "_is_being_read", lambda *_: True)
        assert isinstance(sides.cache.put(name_of(1), large), np.ndarray)
    assert not caplog.records
    assert isinstance(sides.cache.put(name_of(1), large), RingPlace)
    sides.cache.put(name_of(2), too_large)
    [warning] = caplog.records
    assert warning.getMessage().startswith("3145728 bytes do not fit into the ring")


@of(*KEEPING)
def test_dropped_and_cleared_ones_are_gone(sides: Sides) -> None:
    for number in range(4):
        sides.put(number)
    sides.cache.drop(name_of(1))
    assert [number for number in range(4) if sides.is_kept(number)] == [0, 2, 3]
    sides.cache.check_invariants()
    sides.cache.clear()
    assert not any(map(sides.is_kept, range(4)))
    sides.cache.check_invariants()
    assert sides.arrives(1, sides.put(1))
    assert sides.is_kept(1)


@of(*MODES)
def test_a_place_that_was_given_up_is_recognised(sides: Sides) -> None:
    carried = [(number, sides.put(number)) for number in range(3)]
    sides.cache.clear()
    for number, each in carried:
        is_inline = isinstance(each, np.ndarray)
        assert (sides.send(number, each) is None) == (not is_inline)


@of("shm", "shared")
def test_places_hold_what_they_held_or_nothing_whatever_came_after(sides: Sides) -> None:
    carried = {number: sides.put(number) for number in range(300)}
    outcomes = {number: sides.send(number, each) for number, each in carried.items()}
    assert outcomes[0] is None
    assert outcomes[299] is not None
    for number, outcome in outcomes.items():
        assert outcome is None or np.array_equal(outcome, picture(number))


@of(*KEEPING)
def test_the_oldest_goes_when_room_is_needed(sides: Sides) -> None:
    for number in range(200):
        sides.put(number)
        sides.cache.check_invariants()
    kept = [number for number in range(200) if sides.is_kept(number)]
    assert 60 <= len(kept) <= 85
    assert kept == list(range(200))[-len(kept) :]


@of(*BY_USE)
@pytest.mark.parametrize("use", [PixelCache.touch, PixelCache.get_and_update, PixelCache.read])
def test_used_pixels_are_evicted_after_unused_ones(sides: Sides, use: Callable[[PixelCache, str], object]) -> None:
    for number in range(50):
        sides.put(number)
    getattr(sides.cache, use.__name__)(name_of(0))
    for number in range(50, 110):
        sides.put(number)
    assert sides.is_kept(0)
    assert not sides.is_kept(1)


@of(*MODES)
def test_what_arrived_is_never_changed_by_anyone(sides: Sides) -> None:
    arrived = [(number, sides.send(number, sides.put(number))) for number in range(3)]
    sides.cache.clear()
    for number in range(100, 300):
        sides.put(number)
    for number, pixels in arrived:
        assert pixels is not None
        assert np.array_equal(pixels, picture(number))


@of("processor_only", "lru")
def test_a_view_is_kept_without_what_it_was_cut_from(sides: Sides) -> None:
    whole = picture(1, (512, 512, 3))
    carried = sides.cache.put(name_of(1), whole[:64, :64])
    arrived = sides.send(1, carried)
    assert arrived is not None
    assert arrived.base is None
    assert np.array_equal(arrived, whole[:64, :64])


@of(*MODES)
def test_slices_are_carried_as_what_they_show(sides: Sides) -> None:
    whole = picture(1, (100, 90, 3))
    for number, view in enumerate((whole[::2, ::-1], whole.transpose(1, 0, 2), whole[5:6])):
        expected = view.copy()
        arrived = sides.send(number, sides.cache.put(name_of(number), view))
        assert arrived is not None
        assert np.array_equal(arrived, expected)


@of(*MODES)
def test_twenty_threads_at_once_get_what_they_ask_for(sides: Sides) -> None:
    failures: list[object] = []

    def use(seed: int) -> None:
        try:
            for number in np.random.default_rng(seed).integers(0, 120, 60).tolist():
                carried = sides.cache.get_and_update(name_of(number))
                if carried is None:
                    carried = sides.put(number)
                read = sides.cache.read(name_of(number))
                if read is not None and not np.array_equal(read, picture(number)):
                    failures.append(number)
                if number % 40 == 0:
                    sides.cache.drop(name_of(number))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert sides.arrives(1, sides.put(1))


@pytest.fixture(params=BY_USE)
def two_frontends(request: pytest.FixtureRequest) -> Iterator[tuple[PixelCache, PixelCache]]:
    with RunDirectory.create() as directory:
        config = Config(mm_processor_cache_gb=MAX_BYTES / (1 << 30))
        one, two = (open_pixel_cache(request.param, config, directory.path) for _ in range(2))
        yield one, two
        one.close()
        two.close()


@pytest.mark.parametrize(
    "is_found",
    [
        lambda cache: cache.get_and_update(name_of(1)) is not None,
        lambda cache: cache.read(name_of(1)) is not None,
        lambda cache: cache.look(name_of(1)) is not None,
        lambda cache: cache.is_held(name_of(1)),
        lambda cache: cache.newest(1) != [],
        lambda cache: cache.size().num_entries == 1,
    ],
)
def test_pixels_cleared_by_one_frontend_are_found_by_none(
    two_frontends: tuple[PixelCache, PixelCache], is_found: Callable[[PixelCache], bool]
) -> None:
    one, two = two_frontends
    for clearing, other in ((one, two), (two, one), (one, two)):
        other.put(name_of(1), picture(1))
        assert other.pin(name_of(1), 60)
        assert is_found(other)
        clearing.clear()
        assert not is_found(other)
        other.check_invariants()


def test_what_comes_after_a_frontend_cleared_or_closed_its_cache_stays(
    two_frontends: tuple[PixelCache, PixelCache],
) -> None:
    one, two = two_frontends
    one.clear()
    two.put(name_of(1), picture(1))
    one.close()
    assert two.is_held(name_of(1))


@pytest.mark.parametrize(("mode", "call"), [("shm", "posix_fallocate"), ("shared", "mkdir")])
def test_without_room_in_shared_memory_the_frontend_keeps_its_own_and_says_so(
    mode: PixelMode, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RunDirectory.create() as directory:
        source = open_pixel_source(mode, Config(mm_processor_cache_gb=1e-3), directory.path)

        def fail(*arguments: object, **options: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path if call == "mkdir" else os, call, fail)
        sides = Sides(mode, open_pixel_cache(mode, Config(mm_processor_cache_gb=1e-3), directory.path), source)
        monkeypatch.undo()
        assert f"processor_only instead of {mode}" in caplog.text
        assert sides.arrives(1, sides.put(1))
        assert sides.is_kept(1)
        source.close()


def test_the_ring_takes_no_larger_object_than_it_is_told() -> None:
    with RunDirectory.create() as directory:
        config = Config(mm_processor_cache_gb=1e-3, mm_shm_cache_max_object_size_mb=0.01)
        cache = open_pixel_cache("shm", config, directory.path)
        assert isinstance(cache.put(name_of(1), picture(1)), np.ndarray)
        assert isinstance(cache.put(name_of(2), picture(2, (50, 64, 3))), RingPlace)
        cache.close()


@pytest.mark.parametrize("sides", BY_USE, indirect=True)
def test_pinned_pixels_outlast_those_used_later(sides: Sides) -> None:
    sides.put(0)
    assert sides.cache.pin(name_of(0), 60)
    for number in range(1, 200):
        sides.put(number)
    assert sides.is_kept(0)
    assert sides.is_kept(199)
    sides.cache.unpin(name_of(0))
    for number in range(200, 400):
        sides.put(number)
    assert not sides.is_kept(0)


@pytest.mark.parametrize("sides", BY_USE, indirect=True)
def test_a_pin_ends_by_itself_when_it_was_said_last(sides: Sides) -> None:
    for number in range(3):
        sides.put(number)
    for number, seconds in ((0, 0), (1, 0), (1, 60), (2, 60), (2, 0)):
        assert sides.cache.pin(name_of(number), seconds)
    for number in range(3, 200):
        sides.put(number)
    assert [sides.is_kept(number) for number in range(3)] == [False, True, False]


@pytest.mark.parametrize("sides", BY_USE, indirect=True)
def test_a_pin_that_has_ended_is_not_told_and_takes_no_room_from_other_pins_or_pixels(sides: Sides) -> None:
    for number in range(60):
        sides.put(number)
    assert sides.cache.pin(name_of(59), 0)
    assert not any(each.is_pinned for each in sides.cache.newest(60))
    assert all(sides.cache.pin(name_of(number), 0) for number in range(60))
    for number in range(60, 200):
        sides.put(number)
    assert not sides.is_kept(59)


@pytest.mark.parametrize("sides", BY_USE, indirect=True)
def test_pins_leave_half_of_the_cache_to_others(sides: Sides) -> None:
    num_pinned = 0
    for number in range(100):
        sides.put(number)
        num_pinned += sides.cache.pin(name_of(number), 60)
    assert 30 <= num_pinned <= MAX_BYTES // picture(0).nbytes // 2
    assert sides.cache.pin(name_of(0), 60), "no more than before"
    # Slightly less than half: files have some bytes beside their pixels.
    half = np.zeros((MAX_BYTES // 6 - 1000, 1, 3), np.uint8)
    sides.cache.put(name_of(500), half)
    assert sides.is_kept(500)


@pytest.mark.parametrize("sides", BY_USE, indirect=True)
def test_pixels_without_room_beside_the_pins_are_served_but_not_cached(sides: Sides) -> None:
    for number in range(32):
        sides.put(number)
        sides.cache.pin(name_of(number), 60)
    large = np.zeros((MAX_BYTES // 4, 1, 3), np.uint8)
    assert sides.send(500, sides.cache.put(name_of(500), large)) is not None
    assert not sides.is_kept(500)
    assert sides.is_kept(1)


@pytest.mark.parametrize("sides", BY_USE, indirect=True)
def test_a_pin_keeps_nothing_that_is_dropped_or_cleared(sides: Sides) -> None:
    drops: list[Callable[[], None]] = [lambda: sides.cache.drop(name_of(0)), sides.cache.clear]
    for drop in drops:
        sides.put(0)
        assert sides.cache.pin(name_of(0), 60)
        drop()
        assert not sides.cache.is_held(name_of(0))
        sides.put(0)
        assert [each.is_pinned for each in sides.cache.newest(1)] == [False]


@pytest.mark.parametrize("sides", MODES, indirect=True)
def test_what_is_not_held_cannot_be_pinned_and_looking_changes_nothing(sides: Sides) -> None:
    assert not sides.cache.is_held(name_of(0))
    assert not sides.cache.pin(name_of(0), 60)
    sides.cache.unpin(name_of(0))
    sides.put(0)
    assert sides.cache.is_held(name_of(0)) == (sides.mode in KEEPING)
    assert sides.cache.pin(name_of(0), 60) == (sides.mode in BY_USE)


@of(*KEEPING)
def test_what_is_held_can_be_listed_and_looked_at_the_newest_first(sides: Sides) -> None:
    for number in (1, 2, 3):
        sides.put(number)
    assert [each.media_hash for each in sides.cache.newest(2)] == [name_of(3), name_of(2)]
    for held in sides.cache.newest(9):
        assert picture(1).nbytes <= held.num_bytes <= picture(1).nbytes + 4096
        assert not held.is_pinned
    seen = sides.cache.look(name_of(1))
    assert seen is not None
    assert np.array_equal(seen, picture(1))
    assert sides.cache.newest(1)[0].media_hash == name_of(3)
    assert sides.cache.look(name_of(4)) is None


@of(*MODES)
def test_a_picture_that_is_held_is_told_from_embeddings(sides: Sides) -> None:
    sides.put(1)
    sides.cache.put(name_of(2), carry_embeddings(np.zeros((4, 6), np.float32)))
    assert sides.cache.shows_a_picture(name_of(1)) == (sides.mode in KEEPING)
    assert not sides.cache.shows_a_picture(name_of(2))
    assert not sides.cache.shows_a_picture(name_of(3))


@of(*BY_USE)
def test_the_list_tells_pins_until_they_end(sides: Sides) -> None:
    sides.put(1)
    sides.cache.pin(name_of(1), 60)
    assert [each.is_pinned for each in sides.cache.newest(9)] == [True]
    sides.cache.unpin(name_of(1))
    assert [each.is_pinned for each in sides.cache.newest(9)] == [False]
