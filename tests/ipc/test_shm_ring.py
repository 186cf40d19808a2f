"""The ring returns what was put or nothing; no reader can block it by leaving, dying, stopping or forging handles."""

import ast
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from keepsight.ipc import shm_ring
from keepsight.ipc.record_lock import opened
from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.shm_ring import RingReader, RingWriter, remove_dead_rings
from keepsight.requests import Pixels, RingPlace
from tests.ipc.killed import kill, stopped_process
from tests.ipc.long_handles import distort
from tests.scheduling.long_run import thorough

MAX_BYTES = 64 * 1024
MAX_OBJECT_BYTES = 20_000

# A reader that stops while it reads the place with the given fields.
READER = """
import ast
from keepsight.ipc import shm_ring
from keepsight.requests import RingPlace
stop_in(shm_ring, "_change_count")
shm_ring.RingReader(folder).read(RingPlace(*ast.literal_eval(sys.argv[2])))
"""


def picture(seed: int, num_rows: int = 50) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (num_rows, 20, 3), np.uint8)


@pytest.fixture
def ring(folder: Path) -> Iterator[RingWriter]:
    ring = RingWriter(folder, MAX_BYTES, MAX_OBJECT_BYTES)
    yield ring
    ring.check_invariants()
    ring.close()


@pytest.fixture
def reader(folder: Path) -> RingReader:
    return RingReader(folder)


def put(ring: RingWriter, seed: int, num_rows: int = 50) -> RingPlace:
    place = ring.put(str(seed), picture(seed, num_rows))
    assert place is not None
    ring.check_invariants()
    return place


def fill(ring: RingWriter, first: int, count: int) -> int:
    """Put `count` pictures and return how many of them found room."""
    return sum(ring.put(str(number), picture(0)) is not None for number in range(first, first + count))


def test_pixels_are_readable_until_overwritten(ring: RingWriter, reader: RingReader) -> None:
    places = [put(ring, seed, 1 + seed * 7 % 90) for seed in range(200)]
    read = [reader.read(place) for place in places]
    num_held = sum(pixels is not None for pixels in read)
    assert 5 < num_held < 40
    assert all(pixels is None for pixels in read[:-num_held])
    for seed, pixels in enumerate(read):
        assert pixels is None or np.array_equal(pixels, picture(seed, 1 + seed * 7 % 90))


def test_known_pixels_are_referenced_and_not_rewritten(ring: RingWriter) -> None:
    first = put(ring, 1)
    assert ring.put("1", picture(2)) == first == ring.find("1")


def test_oversized_pixels_are_refused_and_overwrite_nothing(ring: RingWriter) -> None:
    put(ring, 1)
    assert ring.put("object", np.zeros((100, 67, 3), np.uint8)) is None
    assert ring.put("nothing", np.zeros((0, 5, 3), np.uint8)) is None
    assert ring.find("1")


def test_pixels_as_large_as_the_ring_fit_into_it(folder: Path) -> None:
    ring = RingWriter(folder, MAX_BYTES, 1 << 30)
    assert ring.put("larger", np.zeros((MAX_BYTES - 64, 1, 1), np.uint8)) is None
    for name in "ab":
        place = ring.put(name, np.full((MAX_BYTES - 128, 1, 1), ord(name), np.uint8))
        assert place
        ring.check_invariants()
    assert ring.find("a") is None
    ring.close()


def test_dropped_and_cleared_places_are_stale(ring: RingWriter, reader: RingReader) -> None:
    places = [put(ring, seed) for seed in range(5)]
    ring.drop("2")
    ring.drop("unknown")
    assert [reader.read(place) is not None for place in places] == [True, True, False, True, True]
    ring.clear()
    assert not any(reader.read(place) is not None for place in places)
    again = put(ring, 0)
    assert again != places[0]
    assert reader.read(places[0]) is None
    assert reader.read(again) is not None


def test_2000_puts_succeed_behind_an_unread_entry(ring: RingWriter) -> None:
    put(ring, 9999)
    assert fill(ring, 0, 2000) == 2000


def test_the_file_is_fully_allocated_at_the_start_and_never_grows(ring: RingWriter, folder: Path) -> None:
    (path,) = folder.glob("ring-*")
    for _ in range(2):
        assert path.stat().st_size == MAX_BYTES == path.stat().st_blocks * 512
        fill(ring, 0, 100)


def test_creation_without_free_shared_memory_fails_and_leaves_no_file(folder: Path) -> None:
    with pytest.raises(OSError):
        RingWriter(folder, 1 << 50, MAX_OBJECT_BYTES)
    assert not list(folder.iterdir())


def test_closing_removes_the_file_and_makes_places_stale(folder: Path, reader: RingReader) -> None:
    ring = RingWriter(folder, MAX_BYTES, MAX_OBJECT_BYTES)
    place = put(ring, 1)
    ring.close()
    ring.close()
    assert not list(folder.iterdir())
    assert reader.read(place) is None
    assert ring.put("2", picture(2)) is None


# Readers that crash or stop -------------------------------------------------------------------------------------


def fields_of(place: RingPlace) -> str:
    return repr(dataclasses.astuple(place))


def test_pixels_being_read_are_not_overwritten_until_their_reader_dies(
    ring: RingWriter, folder: Path, reader: RingReader
) -> None:
    places = [put(ring, seed) for seed in range(3)]
    with stopped_process(READER, folder, fields_of(places[1])) as process:
        num_put = fill(ring, 100, 1000)
        assert num_put < 40
        ring.check_invariants()
        pixels = reader.read(places[1])
        assert pixels is not None
        assert np.array_equal(pixels, picture(1))
        kill(process)
    assert fill(ring, 2000, 2000) == 2000


def test_a_stopped_reader_blocks_the_ring_only_until_it_is_killed(ring: RingWriter, folder: Path) -> None:
    place = put(ring, 0)
    with stopped_process(READER, folder, fields_of(place)) as reader:
        reader.send_signal(signal.SIGSTOP)
        assert fill(ring, 100, 1000) < 40
        reader.send_signal(signal.SIGCONT)
        assert fill(ring, 3000, 10) == 0
        kill(reader)
    assert fill(ring, 5000, 100) == 100


def test_clearing_waits_for_no_reader(ring: RingWriter, folder: Path, reader: RingReader) -> None:
    place = put(ring, 0)
    with stopped_process(READER, folder, fields_of(place)):
        ring.clear()
        assert fill(ring, 100, 1000) == 1000
        assert reader.read(place) is None


def test_a_reader_whose_place_was_overwritten_reads_nothing_and_keeps_counts_correct(
    ring: RingWriter, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = put(ring, 0), shm_ring._change_count

    def overtaken(*arguments: Any) -> bool:
        """Overwrite the place just after the reader was counted."""
        monkeypatch.undo()
        assert real(*arguments)
        ring.clear()
        return fill(ring, 100, 200) == 200

    monkeypatch.setattr(shm_ring, "_change_count", overtaken)
    assert reader.read(place) is None
    assert all(shm_ring._count_of(ring._descriptor, entry.place) == 0 for entry in ring._entries)


def test_a_late_reader_count_does_not_change_another_picture(
    ring: RingWriter, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ring, 0)
    place, real = put(ring, 1), shm_ring._count_of

    def overtaken(*arguments: Any) -> int | None:
        """Overwrite the place after the reader read its count and before it writes the new one."""
        monkeypatch.undo()
        count = real(*arguments)
        ring.clear()
        for seed in range(2, 20):
            ring.put(str(seed), picture(seed, 70))
        return count

    monkeypatch.setattr(shm_ring, "_count_of", overtaken)
    assert reader.read(place) is None
    held = {seed: ring.read(str(seed)) for seed in range(2, 20)}
    assert all(pixels is None or np.array_equal(pixels, picture(seed, 70)) for seed, pixels in held.items())
    assert fill(ring, 100, 200) == 200


def test_waiting_for_a_locked_count_times_out(
    ring: RingWriter, folder: Path, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_ring, "_PATIENCE_SECONDS", 0.02)
    place = put(ring, 0)
    (path,) = folder.glob("ring-*")
    with (
        opened(path, os.O_RDWR) as other,
        shm_ring._count_lock(other, place) as is_held,
    ):
        assert is_held
        assert reader.read(place) is None
        assert fill(ring, 100, 1000) < 40
    assert fill(ring, 2000, 100) == 100


def test_concurrent_readers_all_succeed_and_leave_a_count_of_zero(ring: RingWriter, reader: RingReader) -> None:
    place, are_right = put(ring, 0), list[bool]()

    def read() -> None:
        for _ in range(20):
            pixels = reader.read(place)
            are_right.append(pixels is not None and np.array_equal(pixels, picture(0)))

    threads = [threading.Thread(target=read) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert are_right == [True] * 200
    assert shm_ring._count_of(ring._descriptor, place) == 0


# Writers that crash ---------------------------------------------------------------------------------------------

WRITER = """
from keepsight.ipc import shm_ring
ring = shm_ring.RingWriter(folder, 65536, 20000)
for number in range(40):
    place = ring.put(str(number), np.full((50, 20, 3), 7, np.uint8))
stop_in(shm_ring.RingWriter, sys.argv[2])
ring.put("last", np.full((50, 20, 3), 8, np.uint8))
"""


@pytest.mark.parametrize("step", ["_try_take_back", "_make_room", "_name_place", "_write", "put"])
def test_a_writer_killed_in_put_leaves_nothing_once_the_next_begins(folder: Path, step: str) -> None:
    with stopped_process(WRITER, folder, step) as writer:
        (path,) = folder.glob("ring-*")
        remove_dead_rings(folder)
        assert path.exists()
        kill(writer)
    ring = RingWriter(folder, MAX_BYTES, MAX_OBJECT_BYTES)
    assert not path.exists()
    assert len(list(folder.iterdir())) == 1
    ring.close()


@pytest.mark.parametrize("step", ["posix_fallocate", "pwrite", "link"])
def test_a_writer_killed_while_it_creates_its_ring_leaves_nothing(folder: Path, step: str) -> None:
    program = f"""
import os
from keepsight.ipc import shm_ring
stop_in(os, "{step}")
shm_ring.RingWriter(folder, 65536, 20000)
"""
    with stopped_process(program, folder) as writer:
        remove_dead_rings(folder)
        assert len(list(folder.iterdir())) == (step == "link")
        kill(writer)
    remove_dead_rings(folder)
    assert not list(folder.iterdir())


def test_a_dead_writer_s_memory_is_freed_though_a_reader_has_it_mapped(folder: Path, reader: RingReader) -> None:
    program = """
from keepsight.ipc import shm_ring
ring = shm_ring.RingWriter(folder, 65536, 20000)
place = ring.put("name", np.full((50, 20, 3), 7, np.uint8))
(folder / "place").write_text(repr((place.ring_id, 1, place.offset, place.num_bytes, place.shape, place.signature)))
stop_in(shm_ring, "_sign")
ring.put("other", np.full((50, 20, 3), 7, np.uint8))
"""
    with stopped_process(program, folder) as writer:
        place = RingPlace(*ast.literal_eval((folder / "place").read_text()))
        assert reader.read(place) is not None
        kill(writer)
    assert reader._ring is not None
    assert reader._ring.content.any()
    remove_dead_rings(folder)
    assert not reader._ring.content.any()
    assert reader.read(place) is None


def test_places_of_an_older_ring_are_stale(ring: RingWriter, folder: Path, reader: RingReader) -> None:
    older = put(ring, 1)
    ring.close()
    newer = RingWriter(folder, MAX_BYTES, MAX_OBJECT_BYTES)
    assert newer.put("1", picture(1)) is not None
    assert reader.read(older) is None
    newer.close()


# Forged handles -------------------------------------------------------------------------------------------------


def test_forged_places_are_refused(ring: RingWriter, reader: RingReader) -> None:
    rng = np.random.default_rng(0)
    places = [put(ring, seed) for seed in range(8)]
    for _ in range(3000):
        place = places[rng.integers(8)]
        forged = distort(place, places, rng)
        pixels = reader.read(forged)
        assert pixels is None or (forged in places and np.array_equal(pixels, picture(places.index(forged))))


def test_pixels_that_look_like_an_entry_are_not_read_as_one(ring: RingWriter, reader: RingReader) -> None:
    place = put(ring, 0)
    header = shm_ring._HEADER.pack(77, 1084, 0, bytes(16), 5, 5, 3)
    fake = np.frombuffer(header.ljust(64 * 3, b"\0"), np.uint8).reshape(1, 64, 3)
    inside = ring.put("fake", fake)
    assert inside
    forged = dataclasses.replace(place, entry_id=77, offset=inside.offset + 64, num_bytes=75, shape=(5, 5, 3))
    assert reader.read(dataclasses.replace(forged, signature=bytes(16))) is None
    assert reader.read(forged) is None


def test_a_file_that_is_no_ring_is_refused(ring: RingWriter, folder: Path, reader: RingReader) -> None:
    place = put(ring, 0)
    for content in (b"", b"x" * 5000):
        (folder / f"ring-{0:016x}").write_bytes(content)
        assert reader.read(dataclasses.replace(place, ring_id=f"{0:016x}")) is None


# Against a model ------------------------------------------------------------------------------------------------

NAMES = st.integers(0, 12).map(str)


class RingAgainstADict(RuleBasedStateMachine):
    """The model is a list of all places ever returned with their pixels, and the reads in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = RunDirectory.create()
        self.ring = RingWriter(self.directory.path, 8192, 4000)
        self.reader = RingReader(self.directory.path)
        self.given: list[tuple[RingPlace, Pixels]] = []
        self.known: dict[str, Pixels] = {}
        self.reading: list[tuple[int, Any, RingPlace]] = []
        # Places being read that were not dropped or cleared meanwhile.
        self.protected: list[RingPlace] = []
        self.num_puts = 0

    @rule(name=NAMES, num_rows=st.integers(1, 70))
    def put(self, name: str, num_rows: int) -> None:
        self.num_puts += 1
        pixels, known = picture(self.num_puts, num_rows), self.ring.find(name)
        place = self.ring.put(name, pixels)
        assert place is not None or num_rows * 60 > 4000 or self.reading
        if place is not None and known is None:
            self.given.append((place, pixels))
        assert known is None or place == known

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        place, pixels = data.draw(st.sampled_from(self.given))
        read = self.reader.read(place)
        assert read is None or np.array_equal(read, pixels)

    @precondition(lambda self: self.given)
    @rule()
    def holds_the_newest(self) -> None:
        place, pixels = self.given[-1]
        if place in [entry.place for entry in self.ring._index.values()]:
            read = self.reader.read(place)
            assert read is not None
            assert np.array_equal(read, pixels)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def begin_to_read(self, data: st.DataObject) -> None:
        place, _ = data.draw(st.sampled_from(self.given))
        (path,) = self.directory.path.glob("ring-*")
        descriptor = os.open(path, os.O_RDWR)
        held = shm_ring._reading_lock(descriptor, place, is_shared=True)
        assert held.__enter__()
        if shm_ring._change_count(descriptor, place, 1):
            self.reading.append((descriptor, held, place))
            self.protected.append(place)
        else:
            held.__exit__(None, None, None)
            os.close(descriptor)

    @precondition(lambda self: self.reading)
    @rule(is_dying=st.booleans())
    def end_to_read(self, is_dying: bool) -> None:
        """End the oldest read; a reader that dies leaves its count behind."""
        descriptor, held, place = self.reading.pop(0)
        if place in self.protected:
            self.protected.remove(place)
        if not is_dying:
            shm_ring._change_count(descriptor, place, -1)
        held.__exit__(None, None, None)
        os.close(descriptor)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        place = self.ring.find(name)
        self.protected = [each for each in self.protected if each != place]
        self.ring.drop(name)
        assert self.ring.find(name) is None
        assert self.ring.read(name) is None

    @rule()
    def clear(self) -> None:
        self.protected = []
        self.ring.clear()

    @invariant()
    def ring_is_consistent(self) -> None:
        self.ring.check_invariants()
        there = [entry.place for entry in self.ring._index.values()]
        assert all(place in there for place in self.protected), "overwritten while it was read"

    def teardown(self) -> None:
        while self.reading:
            self.end_to_read(is_dying=True)
        assert self.ring.put("after all", picture(0, 10)) is not None
        self.ring.close()
        self.directory.close()


def test_reads_return_what_was_put_or_nothing_whatever_readers_do() -> None:
    run_state_machine_as_test(RingAgainstADict, settings=thorough(30))
