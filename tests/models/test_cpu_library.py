"""What is compiled for the CPU compiles for any of them, as whoever installs it may ask (`CFLAGS=-march=native`)."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from keepsight.models import cpu_library

SOURCES = [str(path) for path in Path(cpu_library.__file__).parent.glob("cpu_*.c")]


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("cc"), reason="no compiler here, or for other processors"
)
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cooperlake"])
def test_the_kernels_compile_for_each_kind_of_processor(processor: str, tmp_path: Path) -> None:
    told = [f"-march={processor}", "-shared", "-fPIC", *SOURCES, "-lm", "-o", str(tmp_path / "kernels.so")]
    subprocess.run(["cc", *told], check=True)
