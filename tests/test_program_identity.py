"""An upgrade under a running server is detected, however it comes; what Python writes as it runs is none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from keepsight.errors import ServerStartError
from keepsight.program_identity import check_program_is, identify_program


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("supervisor.py", "models/layers.py", "models/_cpu_kernels.so", "models/cpu_kernels.c"):
        (tmp_path / name).write_text(name)
    return tmp_path


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


def test_files_that_are_not_run_may_come_and_go(package: Path) -> None:
    before = identify_program(package)
    (package / "models/__pycache__").mkdir()
    (package / "models/__pycache__/layers.cpython-311.pyc").touch()
    (package / "models/.layers.py.swp").touch()
    check_program_is(before, package)
