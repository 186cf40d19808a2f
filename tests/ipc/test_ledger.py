"""The counts that all users of a folder share, and how they are repaired after one of them was killed."""

import errno
import os
import struct
import threading
from pathlib import Path

import pytest

from keepsight.ipc.ledger import Held, Ledger


def opened(folder: Path) -> Ledger:
    ledger = Ledger(folder / "ledger")
    ledger.open()
    return ledger


def count(ledger: Ledger, num_bytes: int) -> None:
    ledger.held = Held(num_bytes, 1)


def test_a_new_ledger_is_counted_first_and_changes_are_seen_by_all(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    with one.changing(lambda: count(one, 7)):
        one.add_file(3)
    assert one.known == other.held == Held(num_bytes=10, num_files=2)
    with other.changing(pytest.fail):
        other.remove_file(4)
    assert one.held == Held(num_bytes=6, num_files=1)
    with other.changing(pytest.fail):
        other.remove_file(7)
        other.remove_file(7)
    assert one.held == Held(0, 0), "counts are never negative"


@pytest.mark.parametrize(("number", "is_fatal"), [(errno.EPERM, False), (errno.ENOSYS, False), (errno.ENOSPC, True)])
def test_a_ledger_goes_without_room_of_its_own_only_where_the_system_cannot_make_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_fatal: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    if is_fatal:
        with pytest.raises(OSError, match=os.strerror(number)):
            opened(tmp_path)
        return
    ledger = opened(tmp_path)
    with ledger.changing(lambda: count(ledger, 7)):
        ledger.add_file(3)
    assert opened(tmp_path).held == Held(10, 2)


def test_a_ledger_opened_for_reading_shows_what_others_wrote_and_begins_no_change(tmp_path: Path) -> None:
    one, reader = opened(tmp_path), Ledger(tmp_path / "ledger")
    with one.changing(lambda: count(one, 7)):
        pass
    reader.open(is_read_only=True)
    assert reader.is_open
    assert reader.known == Held(num_bytes=7, num_files=1)
    with pytest.raises(OSError, match="can only be read"), reader.changing(pytest.fail):
        pass
    with pytest.raises(FileNotFoundError):
        Ledger(tmp_path / "another").open(is_read_only=True)


def test_counting_is_retried_until_it_succeeds(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), ledger.changing(lambda: 1 // 0):
            pytest.fail("nothing may be changed")
    with ledger.changing(lambda: count(ledger, 5)):
        assert ledger.held.num_bytes == 5


def test_a_failed_change_keeps_the_counts_noted_so_far(tmp_path: Path) -> None:
    ledger = opened(tmp_path)

    def change_and_fail() -> None:
        with ledger.changing(lambda: count(ledger, 5)):
            ledger.add_file(1)
            raise KeyError

    with pytest.raises(KeyError):
        change_and_fail()
    with ledger.changing(pytest.fail):
        assert ledger.held.num_bytes == 6


def test_an_emptied_ledger_is_counted_again(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    with ledger.changing(lambda: count(ledger, 5)):
        pass
    (tmp_path / "ledger").write_bytes(b"")
    with ledger.changing(lambda: count(ledger, 7)):
        assert ledger.held.num_bytes == 7


def test_a_ledger_of_the_old_format_without_files_is_counted_again(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(struct.pack("<QB", 5, True))
    ledger = opened(tmp_path)
    with ledger.changing(lambda: count(ledger, 7)):
        assert ledger.held == Held(7, 1)


def test_a_ledger_is_opened_once_a_full_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger")

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OSError, match="No space"):
            ledger.open()
        assert not ledger.is_open
    ledger.open()
    with ledger.changing(lambda: count(ledger, 5)):
        assert ledger.held.num_bytes == 5


def test_using_a_closed_ledger_is_an_error_until_it_is_opened(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.close()
    with pytest.raises(OSError, match="closed"), ledger.changing(lambda: count(ledger, 5)):
        pytest.fail("nothing may be changed")
    ledger.open()
    with ledger.changing(lambda: count(ledger, 5)):
        assert ledger.held.num_bytes == 5


def test_a_change_that_does_not_end_neither_holds_up_closing_nor_loses_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepsight.ipc.ledger._CLOSING_SECONDS", 0.01)
    ledger = opened(tmp_path)
    closing = threading.Thread(target=ledger.close)
    with ledger.changing(lambda: count(ledger, 5)):
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        ledger.add_file(1)
    assert ledger.known == Held(num_bytes=6, num_files=2)
    ledger.close()
    assert not ledger.is_open
