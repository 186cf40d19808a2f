"""The engine's side alone: what it refuses, what it keeps, and what it reports of that."""

from collections.abc import Iterator

import numpy as np
import pytest

from keepsight.config import Config
from keepsight.engine.pixel_source import KeptPixels, PixelSource, StoreSource, open_pixel_source
from keepsight.ipc.pixel_mode import PixelMode
from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.shared_store import SharedStore
from keepsight.requests import MediaArrived, RingPlace, StoredPixels
from tests.frontend.pixels.test_pixel_cache import MAX_BYTES, MODES, picture
from tests.names import name_of

NOWHERE: tuple[RingPlace | StoredPixels, ...] = (
    RingPlace("0" * 16, 1, 64, 12288, (64, 64, 3), bytes(16)),
    RingPlace("../../etc/passwd", 1, 64, 12288, (64, 64, 3), b""),
    StoredPixels((64, 64, 3)),
)


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[PixelSource]:
    mode: PixelMode = request.param
    with RunDirectory.create() as directory:
        source = open_pixel_source(mode, Config(mm_processor_cache_gb=MAX_BYTES / (1 << 30)), directory.path)
        yield source
        source.close()


@pytest.mark.parametrize("source", MODES, indirect=True)
def test_handles_that_lead_nowhere_are_refused_and_inline_pixels_are_not(source: PixelSource) -> None:
    for number, place in enumerate(NOWHERE):
        assert source.receive(MediaArrived(name_of(number), place)) is None
        assert source.receive(MediaArrived("../name", place)) is None
        arrived = source.receive(MediaArrived(name_of(number), picture(number)))
        assert arrived is not None
        assert np.array_equal(arrived, picture(number))


@pytest.mark.parametrize("source", ["none", "processor_only", "shm"], indirect=True)
def test_a_source_without_a_store_finds_nothing_and_has_no_changes(source: PixelSource) -> None:
    source.receive(MediaArrived(name_of(1), picture(1)))
    assert source.find(name_of(1)) is None
    assert source.take_changes() == ((), ())
    source.clear()


def kept(*numbers: int) -> KeptPixels:
    """A store with room for four."""
    source = KeptPixels(4 * picture(0).nbytes)
    for number in numbers:
        source.receive(MediaArrived(name_of(number), picture(number)))
    source.check_invariants()
    return source


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(map(name_of, numbers))


def test_lru_keeps_arrived_pixels_and_reports_them_once() -> None:
    source = kept(1, 2)
    found = source.find(name_of(1))
    assert found is not None
    assert np.array_equal(found, picture(1))
    assert not found.flags.writeable
    assert source.take_changes() == (names(1, 2), ())
    source.receive(MediaArrived(name_of(1), picture(1)))
    assert source.take_changes() == ((), ())


def test_lru_drops_the_least_recently_found_and_reports_it() -> None:
    source = kept(1, 2, 3, 4)
    source.take_changes()
    source.find(name_of(1))
    source.receive(MediaArrived(name_of(5), picture(5)))
    source.check_invariants()
    assert source.take_changes() == (names(5), names(2))
    assert source.find(name_of(1)) is not None
    assert source.find(name_of(2)) is None


def test_lru_keeps_what_a_new_request_shows_when_the_request_s_other_pictures_arrive() -> None:
    source = kept(1, 2, 3, 4)
    source.touch(names(1, 11, 12))
    for number in (11, 12):
        source.receive(MediaArrived(name_of(number), picture(number)))
    source.check_invariants()
    assert [number for number in range(13) if source.find(name_of(number)) is not None] == [1, 4, 11, 12]


def test_lru_reports_only_the_final_state_of_pixels_that_came_and_went() -> None:
    source = kept(1)
    source.clear()
    source.check_invariants()
    assert source.take_changes() == ((), names(1))
    source = kept(1)
    source.take_changes()
    source.clear()
    source.receive(MediaArrived(name_of(1), picture(1)))
    assert source.take_changes() == (names(1), ())


def test_a_checked_hit_is_asked_for_and_compared_with_what_is_kept() -> None:
    source = KeptPixels(4 * picture(0).nbytes, verify_hits=1)
    source.receive(MediaArrived(name_of(1), picture(1)))
    assert source.find(name_of(1)) is None
    arrived = source.receive(MediaArrived(name_of(1), picture(1)))
    np.testing.assert_array_equal(arrived, picture(1))
    assert (source.num_verified, source.num_mismatched) == (1, 0)


def test_only_a_hit_that_was_held_back_is_compared_and_only_once() -> None:
    source = KeptPixels(4 * picture(0).nbytes, verify_hits=1)
    arrived = source.receive(MediaArrived(name_of(1), picture(1)))
    assert arrived is not None
    assert source.receive(MediaArrived(name_of(1), picture(1))) is arrived
    assert source.find(name_of(1)) is None
    # Pixels just found for another request come back by the same path.
    assert source.receive(MediaArrived(name_of(1), arrived)) is arrived
    assert source.num_verified == 0
    for _ in range(2):
        assert source.receive(MediaArrived(name_of(1), picture(1))) is arrived
        assert source.num_verified == 1


def test_a_hit_held_back_and_evicted_meanwhile_is_not_compared() -> None:
    source = KeptPixels(4 * picture(0).nbytes, verify_hits=1)
    source.receive(MediaArrived(name_of(1), picture(1)))
    source.find(name_of(1))
    source.clear()
    source.check_invariants()
    for _ in range(2):
        source.receive(MediaArrived(name_of(1), picture(1)))
    assert source.num_verified == 0


def test_kept_pixels_that_prove_wrong_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    source = KeptPixels(4 * picture(0).nbytes, verify_hits=1)
    source.receive(MediaArrived(name_of(1), picture(1)))
    assert source.find(name_of(1)) is None
    arrived = source.receive(MediaArrived(name_of(1), picture(2)))
    assert arrived is not None
    assert np.array_equal(arrived, picture(2))
    assert source.find(name_of(1)) is None
    assert source.receive(MediaArrived(name_of(1), picture(2))) is arrived
    assert (source.num_verified, source.num_mismatched) == (2, 1)
    assert "OTHER PIXELS" in caplog.text
    source.check_invariants()


@pytest.mark.parametrize("source", MODES, indirect=True)
def test_pixels_go_first_while_embeddings_of_their_picture_are_held(source: PixelSource) -> None:
    """Nothing happens where this side does not decide about eviction."""
    room = MAX_BYTES // (picture(0).nbytes + 4096)

    def put(number: int) -> None:
        source.receive(MediaArrived(name_of(number), picture(number)))
        if isinstance(source, StoreSource):
            source._store.put(name_of(number), picture(number))

    def held() -> set[int]:
        return {number for number in range(2 * room) if source.find(name_of(number)) is not None}

    for number in range(room):
        put(number)
    source.note_embeddings(names(4, 7, 9), names(0))
    if not isinstance(source, KeptPixels | StoreSource):
        assert held() == set()
        return
    source.note_embeddings((), names(7))
    for number in range(room, room + 30):
        put(number)
        if 4 not in held() and 9 not in held():
            break
    assert held() == {*range(number + 1)} - {4, 9}
    # The next engine does not hold what a previous one held.
    source.note_embeddings(names(20), ())
    if isinstance(source, StoreSource):
        StoreSource(source._store)
        put(number + 1)
        assert 20 in held()


def test_where_hits_are_checked_the_store_s_frontends_are_asked_first() -> None:
    config = Config(mm_processor_cache_gb=MAX_BYTES / (1 << 30), verify_hits=0.5)
    with RunDirectory.create() as directory:
        source = open_pixel_source("shared", config, directory.path)
        SharedStore(directory.path, MAX_BYTES).put(name_of(1), picture(1))
        assert source.find(name_of(1)) is None
        arrived = source.receive(MediaArrived(name_of(1), StoredPixels(picture(1).shape)))
        assert arrived is not None
        source.close()
