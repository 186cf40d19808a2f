"""CPU kernels compile for any processor, also at installation from source, and the best build is loaded."""

import errno
import platform
import shutil
import subprocess
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from keepsight.models import cpu_library
from keepsight.models.cpu_sources import identify_sources
from tests.models.conftest import forget_library

SOURCES = [str(path) for path in Path(cpu_library.__file__).parent.glob("cpu_*.c")]


COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compilers here are for other processors")
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cooperlake", "sapphirerapids"])
def test_the_kernels_compile_for_each_kind_of_processor(compiler: str, processor: str, tmp_path: Path) -> None:
    options = [f"-march={processor}", "-shared", "-fPIC", *SOURCES, "-lm", "-o", str(tmp_path / "kernels.so")]
    subprocess.run([compiler, *options], check=True)


def test_a_processor_takes_a_lesser_build_where_its_own_was_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a compiler that does not know the processor's instructions."""
    if not cpu_library.has_library():
        pytest.skip("there was no compiler when keepsight was installed")
    looked_for = []

    def find(name: str) -> ModuleSpec | None:
        looked_for.append(name.rpartition(".")[2])
        return find_spec(name) if looked_for[-1] == "_cpu_kernels" else None

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(cpu_library, "find_spec", find)
    forget_library()
    assert cpu_library.has_library()
    assert looked_for == ["_cpu_kernels_amx", "_cpu_kernels_avx512", "_cpu_kernels_avx2", "_cpu_kernels"]
    monkeypatch.undo()
    forget_library()


def finds_library(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Look for the library anew, with what was patched, and leave nothing of that behind."""
    forget_library()
    try:
        return cpu_library.has_library()
    finally:
        monkeypatch.undo()
        forget_library()


def test_libraries_of_another_version_are_not_loaded_and_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have functions of the same names, but may lay out their arguments differently."""
    if not cpu_library.has_library():
        pytest.skip("there was no compiler when keepsight was installed")
    ours = identify_sources(Path(cpu_library.__file__).parent).encode()

    def find(name: str) -> ModuleSpec | None:
        if (spec := find_spec(name)) is None or spec.origin is None:
            return None
        old = tmp_path / name
        old.write_bytes(Path(spec.origin).read_bytes().replace(ours, ours[::-1]))
        return ModuleSpec(name, None, origin=str(old))

    monkeypatch.setattr(cpu_library, "find_spec", find)
    assert not finds_library(monkeypatch)
    (line,) = caplog.messages
    assert "another version" in line
    assert "make install" in line


def test_a_library_that_vanishes_as_it_is_read_gives_way_to_the_next_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that may not be read, or that an installation is just replacing."""

    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None, origin=str(tmp_path / f"{name}.so"))

    monkeypatch.setattr(cpu_library, "find_spec", find)
    assert not finds_library(monkeypatch)
    assert len(caplog.messages) == len(cpu_library.builds_for_this_processor())
    assert all("cannot be read ([Errno 2] No such file" in line for line in caplog.messages)
    assert "_cpu_kernels.so" in caplog.messages[-1]


def test_libraries_are_not_used_where_it_cannot_be_told_what_they_were_compiled_from(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(models: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(models / "cpu_norm.c"))

    monkeypatch.setattr(cpu_library, "identify_sources", fail)
    monkeypatch.setattr(cpu_library, "find_spec", lambda name: ModuleSpec(name, None, origin=__file__))
    assert not finds_library(monkeypatch)
    assert "cpu_norm.c" in caplog.text
