"""The store returns what was put or nothing and keeps its budget, even if other users are killed at any point."""

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from keepsight.ipc import ledger
from keepsight.ipc.ledger import Held
from keepsight.ipc.record_lock import opened, try_lock
from keepsight.ipc.run_directory import RunDirectory
from keepsight.ipc.shared_store import SharedStore
from keepsight.lru_cache import CacheSize
from keepsight.requests import Pixels
from tests.ipc.killed import kill, stopped_process
from tests.names import name_of
from tests.scheduling.long_run import thorough

PAGE = 4096
MAX_BYTES = 10 * PAGE


def picture(seed: int, num_pages: int = 1) -> Pixels:
    """Return a picture that takes the given number of pages."""
    rows = (num_pages * PAGE - 64) // 60
    return np.random.default_rng(seed).integers(0, 256, (rows, 20, 3), np.uint8)


@pytest.fixture
def store(folder: Path) -> Iterator[SharedStore]:
    store = SharedStore(folder, MAX_BYTES)
    yield store
    store.check_invariants()
    store.close()


def put(store: SharedStore, *numbers: int) -> None:
    for number in numbers:
        assert store.put(name_of(number), picture(number))


def held(store: SharedStore, count: int = 40) -> list[int]:
    """Return the stored numbers without marking them as used."""
    return [number for number in range(count) if (store._directory / name_of(number)).exists()]


def test_pixels_are_read_in_place_bit_for_bit_and_read_only(store: SharedStore) -> None:
    put(store, 1)
    pixels = store.read(name_of(1))
    assert pixels is not None
    assert np.array_equal(pixels, picture(1))
    assert not pixels.flags.owndata
    assert not pixels.flags.writeable
    with pytest.raises(ValueError):
        pixels.flags.writeable = True


def test_a_run_directory_that_was_removed_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SharedStore(tmp_path / "removed", MAX_BYTES)
    assert not list(tmp_path.iterdir())


def test_pixels_put_by_one_process_are_seen_by_all(store: SharedStore, folder: Path) -> None:
    other = SharedStore(folder, MAX_BYTES)
    put(store, 1)
    put(other, 2)
    assert held(store) == held(other) == [1, 2]
    assert store.num_bytes == other.num_bytes == 2 * PAGE
    assert store.size() == other.size() == CacheSize(2 * PAGE, MAX_BYTES, 2, 0)
    other.clear()
    assert store.read(name_of(1)) is None
    assert store.num_bytes == 0
    other.close()


def test_the_least_recently_used_in_any_process_is_evicted_first(store: SharedStore, folder: Path) -> None:
    other = SharedStore(folder, MAX_BYTES)
    put(store, *range(10))
    other.touch(name_of(0))
    store.read(name_of(1))
    put(other, 2)
    put(store, 10, 11)
    put(other, 12)
    assert held(store) == [0, 1, 2, 6, 7, 8, 9, 10, 11, 12]
    other.touch(name_of(6))
    put(store, 13, 14)
    assert held(store) == [0, 1, 2, 6, 9, 10, 11, 12, 13, 14]
    other.close()


def test_readers_keep_evicted_pixels_that_they_hold(store: SharedStore) -> None:
    put(store, 0)
    pixels = store.read(name_of(0))
    put(store, *range(1, 30))
    assert held(store) == list(range(20, 30))
    np.testing.assert_array_equal(pixels, picture(0))


def test_the_budget_counts_whole_pages(store: SharedStore) -> None:
    assert store.put(name_of(1), np.zeros((1, 1, 3), np.uint8))
    assert store.put(name_of(2), picture(2, 3))
    assert store.put(name_of(3), np.zeros((PAGE - 63, 1, 1), np.uint8))
    assert store.num_bytes == 6 * PAGE
    store.drop(name_of(2))
    store.drop(name_of(2))
    assert store.num_bytes == 3 * PAGE


def test_a_count_during_an_eviction_misses_only_the_evicted(
    store: SharedStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *range(5))
    scandir, gone = os.scandir, folder / "gone"

    @contextmanager
    def scan_and_lose_one(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with scandir(path) as entries:
            found = list(entries)
        Path(found[0].path).rename(gone)
        yield found
        gone.rename(found[0].path)

    monkeypatch.setattr(os, "scandir", scan_and_lose_one)
    assert len(store.newest(40)) == 4


def test_pixels_larger_than_the_store_are_refused_with_one_warning_and_evict_nothing(
    store: SharedStore, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1)
    for number in (2, 3):
        assert not store.put(name_of(number), picture(number, 11))
    assert store.put(name_of(4), picture(4, 10))
    assert held(store) == [4]
    sizes = f"an item of {11 * PAGE} bytes exceeds the store of {MAX_BYTES} bytes"
    assert caplog.messages == [f"{sizes}: such items are served but not stored"]


def test_a_pin_that_cannot_be_written_is_refused_with_one_warning_and_the_pixels_stay_stored(
    store: SharedStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1)
    (folder / "pins").touch()
    assert not store.pin(name_of(1), 100)
    assert not store.pin(name_of(1), 100)
    (message,) = caplog.messages
    assert message.startswith("a pin cannot be written: ")
    assert "not stored" not in message
    assert held(store) == [1]


@pytest.mark.parametrize("name", ["", "../x", "A" * 64, "ledger", "a" * 31, "a" * 129, "a" * 63 + "/", "a" * 64 + "\n"])
def test_only_media_hashes_are_names(store: SharedStore, folder: Path, name: str) -> None:
    with store.making([name]):
        before = sorted(folder.rglob("*"))
    assert not store.put(name, picture(1))
    assert store.read(name) is None
    assert not store.touch(name)
    assert not store.pin(name, 100)
    store.drop(name)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("damage", ["empty", "short", "truncated", "longer", "garbage", "another shape"])
def test_a_damaged_file_is_a_miss_and_removed(store: SharedStore, damage: str) -> None:
    put(store, 1, 2)
    path = store._directory / name_of(1)
    content = path.read_bytes()
    damaged = {
        "empty": b"",
        "short": content[:40],
        "truncated": content[:-1],
        "longer": content + b"x",
        "garbage": os.urandom(len(content)),
        "another shape": content[:8] + b"\xff" * 12 + content[20:],
    }
    path.write_bytes(damaged[damage])
    assert store.read(name_of(1)) is None
    assert held(store) == [2]
    store.clear()
    assert store.num_bytes == 0
    put(store, 1)
    assert store.read(name_of(1)) is not None


def test_in_a_full_or_removed_folder_nothing_is_stored(
    store: SharedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1)

    def write(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    assert not store.put(name_of(2), picture(2))
    assert not store.put(name_of(3), picture(3))
    monkeypatch.undo()
    (message,) = caplog.messages
    assert "No space left" in message
    assert message.endswith(": such items are served but not stored")
    assert held(store) == [1]
    assert store.num_bytes == PAGE
    (store._directory / name_of(1)).unlink()
    store._directory.rmdir()
    assert not store.put(name_of(2), picture(2))
    assert store.read(name_of(1)) is None
    store._directory.mkdir()
    store.clear()


def test_a_full_tmpfs_fails_a_put_halfway_and_leaves_nothing(
    store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """write(2) writes less than requested, then fails with ENOSPC."""
    real, calls = os.write, []

    def write(descriptor: int, content: Any) -> int:
        calls.append(len(content))
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(descriptor, content[:1000])

    monkeypatch.setattr(os, "write", write)
    assert not store.put(name_of(1), picture(1))
    assert len(calls) == 3
    monkeypatch.undo()
    assert held(store) == []
    put(store, 1)


def test_writing_in_pieces_writes_all(store: SharedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, content[:1000]))
    put(store, 1)
    np.testing.assert_array_equal(store.read(name_of(1)), picture(1))


def test_closing_empties_the_store(folder: Path) -> None:
    store = SharedStore(folder, MAX_BYTES)
    store.close()
    store.close()
    assert not store.put(name_of(1), picture(1))
    assert store.size() == CacheSize(0, MAX_BYTES, 0, 0)
    with pytest.raises(OSError, match="closed"):
        store.clear()


# Killed or stopped processes --------------------------------------------------------------------------------------

WRITER = """
import os
from keepsight.ipc import shared_store
store = shared_store.SharedStore(folder, 10 * 4096)
for number in range(10):
    assert store.put(f"{number:064x}", np.full((1300, 1, 3), number, np.uint8))
stop_in({"os": os, "store": shared_store}[sys.argv[2]], sys.argv[3])
store.put("a" * 64, np.full((2600, 1, 3), 7, np.uint8))
"""
STEPS = [
    ("store", "open_unnamed"),
    ("store", "_write"),
    ("store", "give_name"),
    ("os", "write"),
    ("os", "pwrite"),
    ("os", "link"),
    ("os", "utime"),
]


@pytest.mark.parametrize(("module", "step"), STEPS)
def test_a_process_killed_in_put_leaves_a_correct_ledger_and_no_partial_file(
    folder: Path, module: str, step: str
) -> None:
    with stopped_process(WRITER, folder, module, step) as writer:
        kill(writer)
    store = SharedStore(folder, MAX_BYTES)
    store.check_invariants()
    assert {path.name for path in folder.iterdir()} == {"pixels", "ledger"}
    for number in range(10):
        pixels = store.read(f"{number:064x}")
        assert pixels is None or (pixels == number).all()
    pixels = store.read("a" * 64)
    assert pixels is None or (pixels.shape == (2600, 1, 3) and (pixels == 7).all())
    put(store, 1)
    store.close()


def test_a_stopped_process_blocks_others_puts_only_until_their_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_PATIENCE_SECONDS", 0.02)
    with stopped_process(WRITER, folder, "store", "_write") as writer:
        writer.send_signal(signal.SIGSTOP)
        store = SharedStore(folder, MAX_BYTES)
        assert not store.put(name_of(1), picture(1))
        assert store.read(f"{5:064x}") is not None
        with pytest.raises(TimeoutError):
            store.clear()
        kill(writer)
    put(store, 1)
    store.check_invariants()
    store.close()


def test_the_next_start_removes_the_files_of_a_killed_server(tmp_path: Path) -> None:
    program = """
from keepsight.ipc import shared_store, shm_ring
from keepsight.ipc.run_directory import RunDirectory
directory = RunDirectory.create(folder)
ring = shm_ring.RingWriter(directory.path, 65536, 20000)
store = shared_store.SharedStore(directory.path, 1 << 20)
store.put("a" * 64, np.zeros((50, 20, 3), np.uint8))
stop_in(shared_store, "_write")
store.put("b" * 64, np.zeros((50, 20, 3), np.uint8))
"""
    with stopped_process(program, tmp_path) as server:
        assert len(list(tmp_path.rglob("*"))) == 5
        kill(server)
    with RunDirectory.create(tmp_path) as directory:
        assert list(tmp_path.rglob("*")) == [directory.path]


BUSY = """
from keepsight.ipc import shared_store
store = shared_store.SharedStore(folder, 10 * 4096)
rng = np.random.default_rng(int(sys.argv[2]))
print("stopped", flush=True)
while True:
    number = int(rng.integers(30))
    with store.making([f"{number:064x}"]):
        store.put(f"{number:064x}", np.full((1300, 1, 3), number, np.uint8))
    pixels = store.read(f"{int(rng.integers(30)):064x}")
"""


def test_processes_killed_at_any_point_leave_a_correct_ledger(store: SharedStore, folder: Path) -> None:
    rng = np.random.default_rng(0)
    with ExitStack() as stack:
        for seed in range(4):
            process = stack.enter_context(stopped_process(BUSY, folder, str(seed)))
            for number in rng.integers(0, 30, 100).tolist():
                with store.making([f"{number:064x}"]):
                    assert store.put(f"{number:064x}", np.full((1300, 1, 3), number, np.uint8))
                pixels = store.read(f"{number:064x}")
                assert pixels is None or (pixels == number).all()
                assert store.num_bytes <= MAX_BYTES
            if seed != 3:
                kill(process)
            store.check_invariants()


# One process makes a picture, others wait -------------------------------------------------------------------------


def test_pixels_wanted_by_many_are_made_once(store: SharedStore, folder: Path) -> None:
    made: list[int] = []
    start = threading.Barrier(8)

    def want() -> None:
        mine = SharedStore(folder, MAX_BYTES)
        start.wait(20)
        for number in range(5):
            with mine.making([name_of(number)]):
                if mine.read(name_of(number)) is None:
                    made.append(number)
                    put(mine, number)
        mine.close()

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(made) == list(range(5))


def test_claims_in_different_orders_do_not_deadlock(store: SharedStore) -> None:
    done: list[int] = []

    def want(numbers: list[int]) -> None:
        for _ in range(200):
            with store.making([name_of(number) for number in numbers]):
                pass
        done.append(1)

    threads = [threading.Thread(target=want, args=(order,)) for order in ([1, 2, 3], [3, 2, 1], [2, 2, 1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 3


def is_being_made(folder: Path, media_hash: str) -> bool:
    with opened(folder / "claims", os.O_RDWR) as claims, try_lock(claims, int(media_hash[:15], 16)) as is_free:
        return not is_free


def test_another_process_takes_over_if_a_maker_is_killed_or_fails(store: SharedStore, folder: Path) -> None:
    program = f"""
from keepsight.ipc import shared_store
store = shared_store.SharedStore(folder, 1 << 20)
with store.making(["{name_of(1)}"]):
    stop_in(shared_store, "_write")
    store.put("{name_of(1)}", np.zeros((50, 20, 3), np.uint8))
"""
    with stopped_process(program, folder) as maker:
        assert is_being_made(folder, name_of(1))
        assert not is_being_made(folder, name_of(2))
        kill(maker)
    with store.making([name_of(1)]):
        assert is_being_made(folder, name_of(1))
    with pytest.raises(ZeroDivisionError), store.making([name_of(1)]):
        _ = 1 / 0
    assert not is_being_made(folder, name_of(1))
    assert (folder / "claims").stat().st_blocks == 0


def test_evict_first_marks_work_across_processes_but_not_on_pins(store: SharedStore, folder: Path) -> None:
    other = SharedStore(folder, MAX_BYTES)
    put(store, *range(10))
    put(store, 10)
    for number in (3, 4, 5, 30):
        other.evict_first(name_of(number))
    store.undo_evict_first(name_of(4))
    store.read(name_of(3))
    assert store.pin(name_of(5), 100)
    put(store, 11)
    assert held(store) == [1, 2, *range(4, 12)]
    put(store, 12)
    assert held(store) == [2, *range(4, 13)]
    other.close()


def test_a_mark_made_too_late_does_not_apply_to_the_next_entry_of_its_name(store: SharedStore, folder: Path) -> None:
    (folder / "first").mkdir()
    (folder / "first" / name_of(9)).touch()
    put(store, *range(11))
    assert held(store) == list(range(1, 11))


def test_marking_missing_entries_or_failing_to_mark_is_harmless(
    store: SharedStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, *range(10))
    (folder / "first").mkdir()
    (folder / "first" / name_of(40)).touch()
    (folder / "first" / name_of(3)).touch()
    store.evict_first("../name")
    (store._directory / name_of(3)).unlink()
    put(store, 3)
    put(store, 11)
    assert held(store) == [*range(1, 10), 11]
    assert not list((folder / "first").iterdir())
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(errno.ENOSPC, "no space")))
    store.evict_first(name_of(4))
    put(store, 12)
    assert held(store) == [*range(2, 10), 11, 12]


# Against a model --------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 9)
STORE_INDEXES = st.integers(0, 2)


class StoresAgainstAList(RuleBasedStateMachine):
    """The model is a list of names and pages, least recently used first; the stores of three processes take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = RunDirectory.create()
        self.stores = [self.open() for _ in range(3)]
        self.model: list[tuple[int, int]] = []
        # The numbers to evict before all others.
        self.first: set[int] = set()

    def open(self) -> SharedStore:
        return SharedStore(self.directory.path, MAX_BYTES)

    def renew(self, number: int) -> bool:
        self.model.sort(key=lambda entry: entry[0] == number)
        return number in dict(self.model)

    @rule(index=STORE_INDEXES, number=NUMBERS)
    def read(self, index: int, number: int) -> None:
        pixels = self.stores[index].read(name_of(number))
        assert (pixels is not None) == self.renew(number)
        if pixels is not None:
            assert np.array_equal(pixels, picture(number, dict(self.model)[number]))

    @rule(index=STORE_INDEXES, number=NUMBERS)
    def touch(self, index: int, number: int) -> None:
        assert self.stores[index].touch(name_of(number)) == self.renew(number)

    @rule(index=STORE_INDEXES, number=NUMBERS, num_pages=st.integers(1, 11))
    def put(self, index: int, number: int, num_pages: int) -> None:
        is_known = self.renew(number)
        assert self.stores[index].put(name_of(number), picture(number, num_pages)) == (is_known or num_pages <= 10)
        if not is_known and num_pages <= 10:
            while sum(dict(self.model).values()) + num_pages > 10:
                self.model.remove(self.find_evicted())
            self.model.append((number, num_pages))

    def find_evicted(self) -> tuple[int, int]:
        """Return the evicted entry: any of those to evict first, else the least recently used."""
        candidates = [entry for entry in self.model if entry[0] in self.first] or self.model[:1]
        gone = [entry for entry in candidates if entry[0] not in held(self.stores[0])]
        assert gone, "an unexpected entry was evicted"
        self.first.discard(min(gone, key=lambda entry: entry[1])[0])
        return min(gone, key=lambda entry: entry[1])

    @rule(index=STORE_INDEXES, number=NUMBERS)
    def evict_first(self, index: int, number: int) -> None:
        self.stores[index].evict_first(name_of(number))
        if number in dict(self.model):
            self.first.add(number)

    @rule(index=STORE_INDEXES, number=NUMBERS)
    def undo_evict_first(self, index: int, number: int) -> None:
        self.stores[index].undo_evict_first(name_of(number))
        self.first.discard(number)
        self.renew(number)

    @rule(index=STORE_INDEXES)
    def keep_all_again(self, index: int) -> None:
        self.stores[index].keep_all_again()
        self.first = set()

    @rule(index=STORE_INDEXES, number=NUMBERS)
    def drop(self, index: int, number: int) -> None:
        self.stores[index].drop(name_of(number))
        self.model = [entry for entry in self.model if entry[0] != number]
        self.first.discard(number)

    @rule(index=STORE_INDEXES)
    def clear(self, index: int) -> None:
        self.stores[index].clear()
        self.model, self.first = [], set()

    @rule(index=STORE_INDEXES, is_counted=st.booleans())
    def die_within_a_change(self, index: int, is_counted: bool) -> None:
        """Leave the ledger as a process does that dies after writing a wrong count, or before writing the new one."""
        ledger = self.stores[index]._ledger
        ledger.held = Held(ledger.held.num_bytes + PAGE * is_counted, 0)
        self.stores[index].close()
        self.stores[index] = self.open()

    @invariant()
    def holds_the_same_entries(self) -> None:
        self.stores[0].check_invariants()
        assert held(self.stores[1]) == sorted(dict(self.model))

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        self.directory.close()


def test_stores_behave_like_one_plain_list() -> None:
    run_state_machine_as_test(StoresAgainstAList, settings=thorough(30))


def test_threads_and_processes_at_once_stay_within_the_budget(store: SharedStore, folder: Path) -> None:
    failures: list[object] = []
    over: list[int] = []

    def use(seed: int) -> None:
        mine = SharedStore(folder, MAX_BYTES) if seed % 2 else store
        try:
            for number in np.random.default_rng(seed).integers(0, 30, 80).tolist():
                mine.put(name_of(number), picture(number))
                pixels = mine.read(name_of(number))
                if pixels is not None and not np.array_equal(pixels, picture(number)):
                    failures.append(number)
                if mine.num_bytes > MAX_BYTES:
                    over.append(mine.num_bytes)
        except Exception as error:
            logging.exception("in a thread")
            failures.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert not over
