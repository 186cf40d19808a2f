"""What setup.py leaves behind on a machine without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keepsight.models.cpu_sources import identify_sources

ROOT = Path(__file__).parents[1]
MODELS = Path("src/keepsight/models")


def test_without_a_compiler_only_libraries_of_other_sources_are_removed(tmp_path: Path) -> None:
    """After an upgrade they would be taken for ours, and `make` borrows a compiler only if there is no library."""
    pytest.importorskip("setuptools")
    (tmp_path / MODELS).mkdir(parents=True)
    for path in (ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "README.md", *(ROOT / MODELS).glob("cpu_*")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT).parent)
    old, ours = tmp_path / MODELS / "_cpu_kernels.so", tmp_path / MODELS / "_cpu_kernels_avx2.so"
    old.write_bytes(b"\x7fELF")
    ours.write_bytes(b"\x7fELF" + identify_sources(ROOT / MODELS).encode())
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(build, cwd=tmp_path, env=os.environ | {"CC": "false"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not old.exists()
    assert ours.exists()
