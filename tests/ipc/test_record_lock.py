"""Record locks between threads, processes, killed processes and forked children."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.ipc.record_lock import opened, try_lock
from tests.ipc.killed import kill, stopped_process


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Open one file twice."""
    with opened(tmp_path / "file", os.O_RDWR | os.O_CREAT) as one, opened(tmp_path / "file", os.O_RDWR) as other:
        yield one, other


def test_a_byte_is_held_once_and_different_bytes_independently(two: tuple[int, int]) -> None:
    with try_lock(two[0], 5) as first, try_lock(two[1], 5) as second, try_lock(two[1], 6) as third:
        assert (first, second, third) == (True, False, True)
    with try_lock(two[1], 5) as again:
        assert again


def test_a_shared_lock_excludes_exclusive_ones(two: tuple[int, int]) -> None:
    with try_lock(two[0], 8, is_shared=True) as first, try_lock(two[1], 8, is_shared=True) as second:
        assert first
        assert second
        with try_lock(two[1], 8) as alone:
            assert not alone


def test_a_failed_attempt_does_not_release_the_holder_s_lock(two: tuple[int, int]) -> None:
    with try_lock(two[0], 5):
        with try_lock(two[1], 5) as is_held:
            assert not is_held
        with try_lock(two[1], 5) as is_held:
            assert not is_held


def test_waiting_for_a_lock_times_out(two: tuple[int, int]) -> None:
    with try_lock(two[0], 5), try_lock(two[1], 5, patience=0.01) as is_held:
        assert not is_held


def test_a_waiter_gets_the_lock_when_it_is_released(two: tuple[int, int]) -> None:
    order: list[str] = []

    def wait() -> None:
        with try_lock(two[1], 5, patience=20) as is_held:
            order.append("second" if is_held else "in vain")

    thread = threading.Thread(target=wait)
    with try_lock(two[0], 5):
        thread.start()
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


def test_an_error_releases_the_lock(two: tuple[int, int]) -> None:
    with pytest.raises(ZeroDivisionError), try_lock(two[0], 5):
        _ = 1 / 0
    with try_lock(two[1], 5) as is_held:
        assert is_held


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    program = """
from keepsight.ipc import record_lock
stop_in(record_lock, "_set")
with record_lock.opened(folder / "file", 0o102) as descriptor, record_lock.try_lock(descriptor, 5):
    pass
"""
    with stopped_process(program, tmp_path) as process, opened(tmp_path / "file", os.O_RDWR) as descriptor:
        with try_lock(descriptor, 5) as is_held:
            assert not is_held
        kill(process)
        with try_lock(descriptor, 5) as is_held:
            assert is_held


def test_a_released_lock_is_free_though_a_forked_child_has_the_file_open(two: tuple[int, int]) -> None:
    read_end, write_end = os.pipe()
    with try_lock(two[0], 5):
        child = os.fork()
        if not child:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
    with try_lock(two[1], 5) as is_held:
        assert is_held
    os.close(write_end)
    os.waitpid(child, 0)
    os.close(read_end)
