"""Which run directories are removed, by whom and when; processes are really killed."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepsight.errors import ServerStartError
from keepsight.ipc import run_directory
from keepsight.ipc.run_directory import PREFIX, SHARED_MEMORY, RunDirectory, clean_dead

OWNER = """
import sys, time
from pathlib import Path
from keepsight.ipc.run_directory import RunDirectory
directory = RunDirectory.create(Path(sys.argv[1]))
(directory.path / "socket").write_text("x")
print(directory.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that created a run directory, and the directory's path."""
    with subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_directory_is_private_and_removed_when_closed(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        assert directory.path.parent == tmp_path
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o1700
        assert directory.num_free_bytes > 0
        (directory.path / "deep").mkdir()
        (directory.path / "deep" / "file").write_text("x")
    assert not directory.path.exists()
    directory.close()


def test_the_directory_is_in_shared_memory_if_available() -> None:
    if not os.access(SHARED_MEMORY, os.W_OK):
        pytest.skip("no /dev/shm")
    with RunDirectory.create() as directory:
        assert directory.is_shared_memory
        assert RunDirectory(directory.path).is_shared_memory


def test_without_shared_memory_the_directory_is_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RunDirectory.create(tmp_path / "missing") as directory:
        assert directory.path.parent == tmp_path
        assert not directory.is_shared_memory
    assert "missing" in caplog.text


def test_shared_memory_suffices_if_nothing_else_is_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    with RunDirectory.create(tmp_path) as directory:
        assert directory.path.parent == tmp_path


def test_without_any_usable_folder_the_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ServerStartError, match="nor any folder for temporary files can be used") as caught:
        RunDirectory.create(tmp_path / "missing")
    assert str(caught.value).count(f"{tmp_path}/missing: No such file or directory") == 2


def test_full_shared_memory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full, temporary = tmp_path / "full", tmp_path / "temporary"
    full.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    free = run_directory._num_free_bytes
    monkeypatch.setattr(run_directory, "_num_free_bytes", lambda path: 8192 if path == full else free(path))
    with RunDirectory.create(full) as directory:
        assert directory.path.parent == temporary
    assert not list(full.iterdir())
    assert "No space left" in caplog.text


def test_the_required_space_grows_with_a_server_and_each_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(run_directory, "MAX_PARENT_OF_SOCKETS", len(os.fsencode(tmp_path)))

    def fits(num_frontends: int, num_free_bytes: int) -> bool:
        monkeypatch.setattr(run_directory, "_num_free_bytes", lambda _: num_free_bytes)
        try:
            RunDirectory.create(tmp_path, num_frontends=num_frontends).close()
        except ServerStartError:
            return False
        return True

    assert fits(0, 1 << 18)
    assert not fits(1, 1 << 20)
    assert fits(1, 24 << 18)
    assert not fits(2, 6 << 20)
    assert fits(3, 28 << 18)


def test_a_folder_whose_path_is_too_long_for_sockets_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    longest, too_long, limit = tmp_path / "x", tmp_path / "xx", run_directory.MAX_PARENT_OF_SOCKETS
    monkeypatch.setattr(run_directory, "MAX_PARENT_OF_SOCKETS", len(os.fsencode(longest)))
    longest.mkdir()
    too_long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(too_long))
    with pytest.raises(ServerStartError):
        RunDirectory.create(tmp_path / "missing", num_frontends=1)
    assert "see TMPDIR" in caplog.text
    with RunDirectory.create(tmp_path / "missing") as directory:
        assert directory.path.parent == too_long
    with RunDirectory.create(longest, num_frontends=1) as directory:
        within = os.fsencode(directory.path / "engine-1234567").removeprefix(os.fsencode(longest))
        assert limit + len(within) == 107  # the kernel's limit


def test_a_folder_whose_path_is_no_text_is_not_used_by_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory.logger, "disabled", True)  # pytest-xdist cannot send such text
    temporary = tmp_path / os.fsdecode(b"\xff")
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(run_directory, "MAX_PARENT_OF_SOCKETS", len(os.fsencode(temporary)))
    with pytest.raises(ServerStartError, match=r"not UTF-8 \(see TMPDIR\)"):
        RunDirectory.create(tmp_path / "missing", num_frontends=1)
    with RunDirectory.create(tmp_path / "missing") as directory:
        assert directory.path.parent == temporary


def test_closing_an_opened_directory_does_not_remove_it(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path) as directory:
        RunDirectory(directory.path).close()
        assert directory.path.exists()


def test_directories_of_killed_servers_are_removed_and_of_running_ones_kept(
    tmp_path: Path, owner: tuple[subprocess.Popen[str], Path]
) -> None:
    process, path = owner
    clean_dead(tmp_path)
    assert (path / "socket").exists()
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    with RunDirectory.create(tmp_path) as directory:
        assert list(tmp_path.iterdir()) == [directory.path]


def test_a_forked_child_neither_removes_nor_unlocks_it(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path)
    child = os.fork()
    if not child:
        directory.close()
        os._exit(0)
    os.waitpid(child, 0)
    clean_dead(tmp_path)
    assert directory.path.exists()
    directory.close()


def test_links_and_files_with_its_prefix_are_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(kept)
    (tmp_path / f"{PREFIX}file").write_text("x")
    clean_dead(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_foreign_folder_with_the_prefix_keeps_its_files(tmp_path: Path) -> None:
    theirs = tmp_path / f"{PREFIX}results"
    theirs.mkdir()
    (theirs / "file").write_text("x")
    with RunDirectory.create(tmp_path):
        assert (theirs / "file").exists()


def test_an_empty_directory_of_a_server_killed_at_its_start_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}new").mkdir()
    clean_dead(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_file_locks_the_temporary_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, without, temporary = fcntl.flock, tmp_path / "without", tmp_path / "temporary"
    without.mkdir()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def flock(lock: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{lock}").readlink().parent == without:
            raise OSError(errno.ENOLCK, "No locks available")
        real(lock, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    (without / f"{PREFIX}old").mkdir()
    with RunDirectory.create(without) as directory:
        assert directory.path.parent == temporary
    assert [path.name for path in without.iterdir()] == [f"{PREFIX}old"]


def test_another_user_s_directory_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{PREFIX}theirs").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    clean_dead(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_system_that_maps_new_files_to_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system that maps root to the user `nobody`."""
    made = iter([tmp_path / "one", tmp_path / "other"])

    def mkdtemp(**_: object) -> str:
        path = next(made)
        path.mkdir()
        return str(path)

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ServerStartError):
        RunDirectory.create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_removed_before_it_is_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run_directory._try_lock
    disturbed: list[Path] = []

    def try_lock(path: Path) -> int | None:
        if not disturbed:
            disturbed.append(path)
            monkeypatch.setattr(run_directory, "_try_lock", real)
            clean_dead(tmp_path)
        return real(path)

    monkeypatch.setattr(run_directory, "_try_lock", try_lock)
    with RunDirectory.create(tmp_path) as directory:
        assert disturbed
        assert disturbed != [directory.path]
        assert directory.path.exists()


def test_servers_starting_at_once_do_not_remove_each_other_s_directories(tmp_path: Path) -> None:
    made: list[RunDirectory] = []
    threads = [threading.Thread(target=lambda: made.append(RunDirectory.create(tmp_path))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(directory.path for directory in made) == sorted(tmp_path.iterdir())
    assert len(made) == 20
    for directory in made:
        directory.close()
