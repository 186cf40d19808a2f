"""What setup.py leaves of earlier builds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight.models.cpu_sources import identify_sources

ROOT = Path(__file__).parents[1]
MODELS = Path("src/keepsight/models")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the kernels for the CPU are built from."""
    pytest.importorskip("setuptools")
    (tmp_path / MODELS).mkdir(parents=True)
    files = (ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE")
    for path in (*files, *(ROOT / MODELS).glob("cpu_*")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT).parent)
    return tmp_path


def build(clone: Path, *arguments: str) -> None:
    command = [sys.executable, "setup.py", "-q", *arguments]
    done = subprocess.run(command, cwd=clone, env=os.environ | {"CC": "false"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_only_libraries_of_other_sources_are_removed(clone: Path) -> None:
    """After an upgrade they would be taken for ours, and `make` borrows a compiler only if there is no library."""
    old, ours = clone / MODELS / "_cpu_kernels.so", clone / MODELS / "_cpu_kernels_avx2.so"
    old.write_bytes(b"\x7fELF")
    ours.write_bytes(b"\x7fELF" + identify_sources(ROOT / MODELS).encode())
    build(clone, "build_ext", "--inplace")
    assert not old.exists()
    assert ours.exists()


def test_a_file_that_is_gone_from_the_sources_is_not_installed_from_an_earlier_build(clone: Path) -> None:
    """The kernels would be taken for those of other sources for ever."""
    built = clone / "built" / "keepsight" / "models"
    built.mkdir(parents=True)
    for name in ("cpu_gone.h", "cpu_sources.py", "_cpu_kernels.so"):
        (built / name).write_text("as it was before")
    build(clone, "build_py", "--build-lib", "built")
    assert not (built / "cpu_gone.h").exists()
    assert (built / "_cpu_kernels.so").exists()
    assert (built / "cpu_sources.py").read_text() == (ROOT / MODELS / "cpu_sources.py").read_text()
    build(clone, "build_py", "--build-lib", "src")
    assert (clone / MODELS / "cpu_sources.py").exists()
