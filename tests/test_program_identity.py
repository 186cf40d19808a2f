"""An upgrade under a running server is detected, however it comes; what Python writes as it runs is none."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keepsight.errors import ServerStartError
from keepsight.program_identity import PACKAGE, check_program_is, identify_program


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "keepsight"
    (package / "models").mkdir(parents=True)
    (package / "models/__init__.py").touch()
    for name in ("supervisor.py", "models/layers.py", "models/_cpu_kernels.so", "models/cpu_kernels.c"):
        (package / name).write_text(name)
    return package


@pytest.mark.parametrize(
    "change",
    [
        lambda package: (package / "supervisor.py").write_text("a new version"),
        lambda package: (package / "models/_cpu_kernels.so").write_text("compiled again, or for the first time"),
        lambda package: (package / "models/layers.py").unlink(),
        lambda package: (package / "models/new.py").touch(),
    ],
)
def test_a_changed_missing_or_new_file_is_another_program(package: Path, change: Callable[[Path], object]) -> None:
    before = identify_program(package)
    check_program_is(before, package)
    change(package)
    with pytest.raises(ServerStartError, match="restart the server"):
        check_program_is(before, package)


@pytest.mark.parametrize(
    "name",
    [
        "__pycache__/layers.cpython-311.pyc",
        "models/.layers.py.swp",
        "models/.#layers.py",
        "models/layers (copy).py",
        "models/.ipynb_checkpoints/layers-checkpoint.py",
        "models/.backup/__init__.py",
        "notes/draft.py",
    ],
)
def test_files_that_no_import_can_reach_may_come_and_go(package: Path, name: str) -> None:
    before = identify_program(package)
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).touch()
    check_program_is(before, package)


def test_files_written_again_with_the_same_content_are_the_same_program(package: Path) -> None:
    """As by `git checkout` of another version and back."""
    before = identify_program(package)
    for path in (package / "supervisor.py", package / "models/_cpu_kernels.so"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (0, 0))
    check_program_is(before, package)


@pytest.mark.parametrize("flag", ["-P", "-I"])
def test_processes_import_from_nowhere_that_the_server_was_started_not_to_import_from(flag: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import keepsight.program_identity as own; "
    command = [sys.executable, flag, "-c", f"{program} print(own.PYTHON[1])"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{flag}\n"


def test_a_process_that_takes_another_installed_copy_says_which(package: Path, tmp_path: Path) -> None:
    """As when `python -m keepsight` is started in a clone's `src` and another clone is installed: no restart helps."""
    installed = shutil.copytree(package, tmp_path / "installed \udcff")
    before = identify_program(package)
    check_program_is(before, installed)
    (installed / "supervisor.py").write_text("another version")
    with pytest.raises(ServerStartError) as raised:
        check_program_is(before, installed)
    message = str(raised.value)
    assert message.startswith(f"the server's processes would run {tmp_path}/installed ?, not {package}: ")
    assert "PYTHONPATH" in message


def test_a_release_to_which_a_link_was_set_is_a_change_since_the_start(package: Path, tmp_path: Path) -> None:
    old, new, current = (tmp_path / name for name in ("old", "new", "current"))
    for release in (old, new):
        shutil.copytree(package, release)
    (new / "supervisor.py").write_text("a new version")
    current.symlink_to(old)
    before = identify_program(current)
    current.unlink()
    current.symlink_to(new)
    with pytest.raises(ServerStartError, match="restart the server"):
        check_program_is(before, current)
