"""Files may be torn, foreign, or left by a killed writer: at worst a miss, and the budget holds."""

import errno
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from keepsight.errors import TierError
from keepsight.ipc import ledger
from keepsight.ipc.record_lock import opened, try_lock
from keepsight.tiers.disk_tier import DiskTier
from tests.ipc.killed import kill, stopped_process
from tests.tiers.arrays import array_of, assert_equal, key_of

PAGE = 4096
MAX_BYTES = 10 * PAGE


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, MAX_BYTES)
    yield tier
    tier.check_invariants()
    tier.close()


def put(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.put(key_of(number), array_of(number))


def held(tier: DiskTier) -> list[int]:
    return [number for number in range(60) if (tier._entries / key_of(number)).exists()]


def reopened(tier: DiskTier, max_bytes: int = MAX_BYTES, policy: str = "lru") -> DiskTier:
    return DiskTier(tier._directory, max_bytes, policy)


def test_entries_and_their_order_survive_a_restart(tier: DiskTier) -> None:
    put(tier, *range(10))
    tier.get(key_of(0))
    tier.close()
    other = reopened(tier)
    assert_equal(other.get(key_of(3)), array_of(3))
    assert other.has(key_of(9))
    assert other.stats().num_entries == 10
    put(other, 10, 11)
    assert held(other) == [0, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    other.check_invariants()
    other.close()


def test_noted_uses_survive_a_restart(tier: DiskTier) -> None:
    put(tier, *range(10))
    tier.note_use(key_of(0))
    tier.note_use(key_of(50))
    put(tier, 10)
    assert held(tier) == [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    tier.note_use(key_of(2))
    other = reopened(tier)
    put(other, 11, 12)
    assert held(other) == [0, 2, 5, 6, 7, 8, 9, 10, 11, 12]
    other.close()


def test_only_what_was_there_is_counted_as_evicted(tier: DiskTier) -> None:
    other = reopened(tier)
    # Two at a time: then each process believes that it knows all files, as there are as many as it knows.
    for number in range(0, 48, 4):
        put(tier, number, number + 1)
        put(other, number + 2, number + 3)
    assert tier.stats().num_evictions + other.stats().num_evictions == 48 - len(held(tier))
    other.close()


def test_another_server_s_entry_is_known_after_putting_the_same_one(tier: DiskTier) -> None:
    tier.open()
    other = reopened(tier)
    put(other, 1)
    assert not tier.has(key_of(1))
    put(tier, 1)
    assert tier.has(key_of(1))
    other.close()


def test_computation_costs_count_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, MAX_BYTES, "cost")
    put(tier, *range(10, 0, -1))
    tier.close()
    other = reopened(tier, policy="cost")
    put(other, 20, 21)
    assert held(other) == [3, 4, 5, 6, 7, 8, 9, 10, 20, 21]
    other.close()


def test_a_smaller_budget_holds_from_the_start_and_what_it_costs_is_logged(
    tier: DiskTier, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, *range(10))
    other = reopened(tier, 4 * PAGE)
    other.check_invariants()
    assert held(other) == [6, 7, 8, 9]
    given = f"held more than the {4 * PAGE} bytes given to this process"
    assert caplog.messages == [f"{tier._directory} {given}: 6 entries were evicted"]
    other.close()


def test_two_servers_share_one_folder_and_one_budget(tier: DiskTier) -> None:
    other = reopened(tier)
    put(tier, 0, 1)
    put(other, 2, 1)
    assert_equal(other.get(key_of(0)), array_of(0))
    assert_equal(tier.get(key_of(2)), array_of(2))
    for number in range(3, 30):
        put((tier, other)[number % 2], number)
        tier.check_invariants()
    assert len(held(tier)) >= 9
    other.clear()
    assert tier.get(key_of(29)) is None
    other.check_invariants()
    other.close()


def test_a_server_accepts_entries_after_another_replaced_its_own(tier: DiskTier) -> None:
    put(tier, *range(10))
    other = reopened(tier)
    put(other, *range(10, 20))
    assert held(tier) == list(range(10, 20)), "as many bytes as before"
    put(tier, 20)
    assert 20 in held(tier)
    assert len(held(tier)) >= 9
    other.close()


def test_stats_include_other_servers_entries_as_of_the_last_own_change_or_find(tier: DiskTier) -> None:
    other = reopened(tier)
    other.open()
    put(tier, 9)
    assert other.get(key_of(9)) is not None
    assert (other.stats().num_entries, other.stats().num_bytes) == (1, PAGE)
    tier.clear()
    put(tier, *range(3))
    put(other, 3)
    assert (other.stats().num_entries, other.stats().num_bytes) == (4, 4 * PAGE)
    other.clear()
    put(tier, 4)
    assert (tier.stats().num_entries, tier.stats().num_bytes) == (1, PAGE)
    other.close()


def test_many_threads_of_two_servers_at_once(tier: DiskTier) -> None:
    tiers = (tier, reopened(tier))
    faults: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            for step in range(60):
                number = (seed * 7 + step * 5) % 25
                found = tiers[seed % 2].get(key_of(number))
                if found is None:
                    tiers[seed % 2].put(key_of(number), array_of(number))
                else:
                    assert_equal(found, array_of(number))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    tiers[1].check_invariants()
    tiers[1].close()


def test_only_the_owner_can_read_files(tier: DiskTier) -> None:
    put(tier, 1)
    for path in tier._directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) in ((0o700,) if path.is_dir() else (0o600,)), path


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "entries").mkdir(mode=0o755)
    (tmp_path / "entries").chmod(0o755)
    with pytest.raises(TierError):
        DiskTier(tmp_path, MAX_BYTES).put(key_of(1), array_of(1))


def warnings_of_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    tier = DiskTier(folder, MAX_BYTES)
    put(tier, 1, 2)
    tier.close()
    return caplog.messages


@pytest.mark.parametrize(("mode", "num_warnings"), [(0o700, 0), (0o755, 0), (0o1777, 0), (0o777, 1)])
def test_a_world_writable_folder_is_warned_of_once(
    mode: int, num_warnings: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(mode)
    warnings = warnings_of_folder(tmp_path, caplog)
    assert len(warnings) == num_warnings
    assert all(each.endswith("everyone can write to it") for each in warnings)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(tmp_path, 12345, -1)
    [warning] = warnings_of_folder(tmp_path, caplog)
    assert warning.endswith("it belongs to user 12345")


@pytest.mark.parametrize("reads", ["get", "verify"])
def test_a_file_that_became_larger_than_any_memory_is_removed_and_the_others_count(tier: DiskTier, reads: str) -> None:
    put(tier, 1, 2)
    os.truncate(tier._entries / key_of(1), 2**41)
    assert not getattr(tier, reads)(key_of(1))
    assert not (tier._entries / key_of(1)).exists()
    assert tier.verify(key_of(2))
    assert tier.stats().num_bytes == PAGE


def test_a_file_that_grew_is_evicted_as_it_was_counted(tier: DiskTier) -> None:
    put(tier, *range(10))
    os.truncate(tier._entries / key_of(0), 2**41)
    put(tier, 10)
    assert held(tier) == [*range(1, 11)]
    assert tier.stats().num_bytes == MAX_BYTES


@pytest.mark.parametrize("damage", ["empty", "header", "truncated", "longer", "flipped", "another's", "zeros"])
def test_a_damaged_file_is_a_miss_and_removed(tier: DiskTier, damage: str) -> None:
    put(tier, 1, 2)
    path = tier._entries / key_of(1)
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[-9] ^= 4
    damaged = {
        "empty": b"",
        "header": content[:200],
        "truncated": content[:-1],
        "longer": content + b"x" * 5000,
        "flipped": bytes(flipped),
        "another's": (tier._entries / key_of(2)).read_bytes(),
        "zeros": content[:1000].ljust(len(content), b"\0"),
    }
    path.write_bytes(damaged[damage])
    assert tier.get(key_of(1)) is None
    assert not path.exists()
    assert tier.stats().num_damaged == 1
    assert not tier.has(key_of(1))
    assert_equal(tier.get(key_of(2)), array_of(2))
    # The file's size was changed behind the tier's back; clearing counts again.
    tier.clear()
    put(tier, 1)
    assert_equal(tier.get(key_of(1)), array_of(1))


def test_of_many_damaged_entries_the_log_names_a_few_and_then_tells_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = DiskTier(tmp_path, 2**30)
    put(tier, *range(100))
    for number in range(100):
        (tier._entries / key_of(number)).write_bytes(b"")
        assert tier.get(key_of(number)) is None
    assert tier.stats().num_damaged == 100
    assert all(message.endswith(": removed") for message in caplog.messages[:20])
    later = [f"{number} entries of {tmp_path} were damaged so far; not each is logged" for number in (40, 80)]
    assert caplog.messages[20:] == later
    tier.close()


def test_a_permission_error_is_not_reported_as_damage(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, 1)

    def refuse(path: str, *_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with monkeypatch.context() as patched:
        for call in ("open", "lstat"):
            patched.setattr(f"keepsight.tiers.disk_tier.os.{call}", refuse)
        with pytest.raises(PermissionError, match=f"Permission denied: '{tier._entries}"):
            tier.get(key_of(1))
    assert (caplog.text, tier.stats().num_damaged) == ("", 0)
    assert_equal(tier.get(key_of(1)), array_of(1))


def test_foreign_files_are_left_alone(tier: DiskTier) -> None:
    put(tier, 1)
    (tier._entries / "README").write_text("mine")
    tier.clear()
    assert (tier._entries / "README").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "socket"])
def test_a_link_or_socket_under_an_entry_s_name_is_a_miss_and_is_replaced(
    tier: DiskTier, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tier._entries / key_of(1)
    for operation in ("get", "verify"):
        put(tier, 1)
        if kind == "link":
            path.rename(tier._directory / "elsewhere")
            path.symlink_to(tier._directory / "elsewhere")
        else:
            path.unlink()
            monkeypatch.chdir(tier._entries)  # The folder's full path is too long for a socket's name.
            with socket.socket(socket.AF_UNIX) as strange:
                strange.bind(path.name)
        assert not getattr(tier, operation)(key_of(1))
        put(tier, 1)
        assert_equal(tier.get(key_of(1)), array_of(1))
    assert tier.stats().num_damaged == 2
    tier.list_sizes()  # Counts again after files were removed behind its back.


def test_stray_folders_are_ignored(tier: DiskTier) -> None:
    put(tier, 1)
    strange = tier._entries / key_of(0)
    for folder in (strange, tier._aside / "x"):
        (folder / "inner").mkdir(parents=True)
    tier.list_sizes()  # Counts again.
    put(tier, *range(2, 20))
    assert len(held(tier)) == 1 + MAX_BYTES // PAGE
    assert tier.get(key_of(0)) is None
    assert tier.stats().num_damaged == 0
    assert not tier.put(key_of(0), array_of(0))
    assert_equal(tier.get(key_of(19)), array_of(19))
    tier.clear()
    assert tier.stats().num_bytes == 0
    assert (strange / "inner").is_dir()


def test_externally_removed_files_are_misses_and_free_their_space(tier: DiskTier) -> None:
    put(tier, *range(10))
    for number in range(5):
        (tier._entries / key_of(number)).unlink()
    assert tier.get(key_of(0)) is None
    put(tier, *range(20, 25))
    assert tier.get(key_of(24)) is not None


def test_a_read_only_folder_is_never_changed(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, *range(3))
    damaged = tier._entries / key_of(2)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    files = contents_of(tier._directory)
    monkeypatch.setattr("keepsight.tiers.disk_tier.os.access", lambda *_: False)
    reader = reopened(tier, max_bytes=2 * PAGE)  # fewer than there are
    reader.open()
    assert all(reader.has(key_of(number)) for number in range(3))
    assert_equal(reader.get(key_of(1)), array_of(1))
    assert [reader.put(key_of(number), array_of(number)) for number in (1, 5)] == [False, False]
    assert caplog.text.count("accepts no more entries: it can only be read") == 1
    assert reader.get(key_of(2)) is None
    assert not reader.has(key_of(2))
    assert reader.get(key_of(2)) is None
    assert caplog.text.count("ignored, as it cannot be removed") == reader.stats().num_damaged == 1
    reader.clear()
    assert "what was to be cleared stays there; this process ignores it" in caplog.text
    assert reader.get(key_of(1)) is None
    assert not reader.has(key_of(1))
    assert len(reader.list_sizes()) == reader.stats().num_entries == 3
    reader.close()
    assert contents_of(tier._directory) == files


def test_a_read_only_folder_without_one_for_unfinished_files_is_read(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, 1)
    tier._aside.rmdir()

    def refuse(path: Path, **_: object) -> None:
        if not path.exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr("keepsight.tiers.disk_tier.os.access", lambda path, _: path != tier._entries and path.exists())
    reader = reopened(tier)
    assert_equal(reader.get(key_of(1)), array_of(1))
    assert not reader.put(key_of(2), array_of(2))
    reader.close()


def test_a_full_folder_that_is_closed_while_in_use_loses_no_entry(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, *range(20))
    known = held(tier)
    with monkeypatch.context() as patched:
        patched.setattr("keepsight.tiers.disk_tier.os.access", lambda *_: False)
        assert not tier.put(key_of(20), array_of(20))
    assert [number for number in range(20) if tier.has(key_of(number))] == known


def contents_of(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_read_only_folder_needs_no_room_for_writing(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 1)
    reader = reopened(tier)
    with monkeypatch.context() as patched:
        patched.setattr("keepsight.tiers.disk_tier.os.access", lambda *_: False)
        reader.open()
    tier._aside.rmdir()
    assert not reader.put(key_of(2), array_of(2))
    assert not tier._aside.exists()
    assert_equal(reader.get(key_of(1)), array_of(1))
    reader.close()


def test_a_removed_folder_is_recreated(tier: DiskTier) -> None:
    put(tier, 1)
    shutil.rmtree(tier._directory)
    assert tier.get(key_of(1)) is None
    put(tier, 1)
    assert_equal(tier.get(key_of(1)), array_of(1))


def test_a_removed_empty_folder_is_recreated(tier: DiskTier) -> None:
    put(tier, 1)
    tier._aside.rmdir()
    put(tier, 2)
    assert_equal(tier.get(key_of(1)), array_of(1))
    assert held(tier) == [1, 2]


def test_servers_share_one_budget_after_their_folder_was_removed(tier: DiskTier) -> None:
    other = reopened(tier)
    put(tier, 1)
    put(other, 2)
    shutil.rmtree(tier._directory)
    put(tier, 1)
    put(other, *range(10, 19))
    put(tier, *range(20, 29))
    assert sum(path.stat().st_blocks * 512 for path in tier._entries.iterdir()) <= MAX_BYTES
    other.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_an_unopenable_folder_is_an_error_for_reads_and_writes(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, "No such luck")

    tier = DiskTier(tmp_path, MAX_BYTES)
    monkeypatch.setattr("keepsight.ipc.ledger.os.open", fail)
    # If only reads failed, the tier would be set aside and used again by turns.
    with pytest.raises(OSError):
        tier.put(key_of(1), array_of(1))
    with pytest.raises(OSError):
        tier.get(key_of(1))


def test_an_uncreatable_folder_is_an_error_until_it_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier = DiskTier(tmp_path / "file" / "cache", MAX_BYTES)
    for _ in range(2):
        with pytest.raises(OSError):
            tier.get(key_of(1))
    (tmp_path / "file").unlink()
    put(tier, 1)
    tier.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO])
@pytest.mark.parametrize("call", ["posix_fallocate", "writev", "utime", "open", "rename", "pwrite"])
def test_a_failed_write_leaves_no_files(
    tier: DiskTier, call: str, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, 1)

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, "No such luck")

    with monkeypatch.context() as patched:
        patched.setattr(f"keepsight.tiers.disk_tier.os.{call}", fail)
        if number != errno.EIO:
            # A disk that is full or closed to the server must not set the tier aside: its entries can still be read.
            assert [tier.put(key_of(each), array_of(each)) for each in (2, 3)] == [False, False]
            assert caplog.text.count("accepts no more entries") == 1
        else:
            with pytest.raises(OSError):
                tier.put(key_of(2), array_of(2))
    tier.check_invariants()
    assert held(tier) == [1]
    assert not list(tier._aside.iterdir())
    put(tier, 2)


def test_a_full_disk_is_logged_once_though_another_process_stored_some_of_the_entries(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier.open()
    other = DiskTier(tier._directory, MAX_BYTES)
    put(other, 1, 2)

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No such luck")

    monkeypatch.setattr("keepsight.tiers.disk_tier.os.posix_fallocate", fail)
    assert [tier.put(key_of(each), array_of(each)) for each in (3, 1, 4, 2, 5)] == [False, True, False, True, False]
    assert caplog.text.count("accepts no more entries") == 1
    other.close()


def test_a_disk_with_room_for_small_entries_only_is_logged_once_until_there_is_more_room(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room, reserve = PAGE, os.posix_fallocate

    def reserve_little(descriptor: int, offset: int, num_bytes: int) -> None:
        if num_bytes > room:
            raise OSError(errno.ENOSPC, "No such luck")
        reserve(descriptor, offset, num_bytes)

    monkeypatch.setattr("keepsight.tiers.disk_tier.os.posix_fallocate", reserve_little)
    sizes = [8000, 3000, 6000, 3000, 8000]
    kept = [tier.put(key_of(number), array_of(number, size)) for number, size in enumerate(sizes)]
    assert kept == [False, True, False, True, False]
    assert caplog.text.count("accepts no more entries") == 1
    room = 2 * PAGE
    assert tier.put(key_of(5), array_of(5, 6000))
    assert not tier.put(key_of(6), array_of(6, 8000))
    assert caplog.text.count("accepts no more entries") == 2, "there had been more room"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_damaged_entry_that_may_not_be_removed_is_a_miss(
    tier: DiskTier, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, 1)
    damaged = tier._entries / key_of(1)
    damaged.write_bytes(damaged.read_bytes()[:-1])

    def fail(path: object, **_: object) -> NoReturn:
        raise OSError(number, "No such luck", path)

    with monkeypatch.context() as patched:
        patched.setattr("keepsight.tiers.disk_tier.os.unlink", fail)
        assert [tier.get(key_of(1)) for _ in range(2)] == [None, None]
    assert damaged.exists()
    assert tier.stats().num_damaged == 1


@pytest.mark.parametrize("function", ["_write", "pack_header"])
def test_a_process_killed_while_writing_leaves_nothing_and_the_budget_holds(tier: DiskTier, function: str) -> None:
    put(tier, 1, 2)
    program = f"""
from keepsight.tiers import disk_tier
from tests.tiers.arrays import array_of, key_of
stop_in(disk_tier, {function!r})
disk_tier.DiskTier(folder, {MAX_BYTES}).put(key_of(3), array_of(3))
"""
    with stopped_process(program, tier._directory) as process:
        tier.check_invariants()
        put(tier, *range(10, 30))
        tier.check_invariants()
        kill(process)
    other = reopened(tier)
    assert other.get(key_of(3)) is None
    other.check_invariants()
    assert not list(other._aside.iterdir())
    put(other, *range(30, 40))
    assert len(held(other)) == 10
    other.close()


@pytest.mark.parametrize("method", ["_reserve", "_unlink", "_make_room"])
def test_the_ledger_is_repaired_after_a_process_was_killed_changing_it(tier: DiskTier, method: str) -> None:
    put(tier, *range(10))
    program = f"""
from keepsight.tiers.disk_tier import DiskTier
from tests.tiers.arrays import array_of, key_of
stop_in(DiskTier, {method!r})
DiskTier(folder, {MAX_BYTES // 2}).put(key_of(50), array_of(50))
"""
    with stopped_process(program, tier._directory) as process:
        kill(process)
    put(tier, 51)
    tier.check_invariants()
    assert_equal(tier.get(key_of(51)), array_of(51))


def test_a_ledger_locked_for_long_blocks_no_reads(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, 1)
    monkeypatch.setattr(ledger, "_PATIENCE_SECONDS", 0.0)
    with opened(tier._directory / "ledger", os.O_RDWR) as descriptor, try_lock(descriptor, 0) as is_held:
        assert is_held
        with pytest.raises(TimeoutError):
            tier.put(key_of(2), array_of(2))
        assert_equal(tier.get(key_of(1)), array_of(1))
    put(tier, 2)


@pytest.mark.parametrize("method", ["open", "list_sizes"])
def test_entries_are_stored_while_another_process_reads_the_headers_of_all(
    tier: DiskTier, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, 1)
    monkeypatch.setattr(ledger, "_PATIENCE_SECONDS", 0.0)
    other, read = reopened(tier), list[str]()

    def put_meanwhile(path: Path) -> float:
        if not read:
            put(tier, 2)
        read.append(path.name)
        return 0.5

    monkeypatch.setattr("keepsight.tiers.disk_tier.seconds_of", put_meanwhile)
    getattr(other, method)()
    assert read == [key_of(1), key_of(2)], "what came meanwhile is counted, too"
    other.check_invariants()
    other.close()


def test_entries_are_stored_while_another_process_clears_many(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, *range(7))
    monkeypatch.setattr(ledger, "_PATIENCE_SECONDS", 0.0)
    other, numbers_left = reopened(tier), list[int]()

    def put_meanwhile() -> None:
        put(tier, 50)
        numbers_left.append(len(held(tier)))

    monkeypatch.setattr("keepsight.tiers.disk_tier._PORTION", 2)
    monkeypatch.setattr("keepsight.tiers.disk_tier.let_others_in", put_meanwhile)
    other.clear()
    assert numbers_left == [6, 4, 2]
    assert held(tier) == []
    assert other.stats().num_entries == 0
    other.close()


@pytest.mark.parametrize("jump", [-(10**18), 10**18])
def test_a_clock_that_jumps_affects_only_the_eviction_order(tmp_path: Path, jump: int) -> None:
    now = [10**18]
    tier = DiskTier(tmp_path, MAX_BYTES, now_ns=lambda: now[0])
    put(tier, *range(8))
    now[0] += jump
    put(tier, *range(8, 15))
    tier.check_invariants()
    assert_equal(tier.get(key_of(14)), array_of(14))
    other = reopened(tier)
    put(other, 20, 21)
    other.check_invariants()
    tier.close()
    other.close()
