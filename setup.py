"""Builds the CPU kernels, one library per kind of processor; everything else is in pyproject.toml.

The libraries are built like extension modules but not imported: cpu_library.py loads the one for its processor.
Without a compiler, or on another kind of processor, torch's own kernels are used, which are slower.
"""

import copy
import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

MODELS = Path("src/keepsight/models")
# Not imported: that would import what is not installed yet.
CPU_SOURCES = runpy.run_path(str(MODELS / "cpu_sources.py"))
IDENTITY = CPU_SOURCES["identify_sources"](MODELS)
FLAGS_OF_PROCESSOR = {
    "": (),
    "_avx2": ("-mavx2", "-mfma"),
    "_avx512": ("-mavx512f", "-mavx512vl", "-mavx512bf16", "-mfma"),
    "_amx": ("-mavx512f", "-mavx512vl", "-mavx512bf16", "-mfma", "-mamx-tile", "-mamx-bf16"),
}


def _kernels(processor: str) -> Extension:
    return Extension(
        f"keepsight.models._cpu_kernels{processor}",
        sources=[str(path) for path in sorted(MODELS.glob("cpu_*.c"))],
        depends=[str(path) for path in sorted(MODELS.glob("cpu_*.h"))],
        define_macros=[("KEEPSIGHT_SOURCES", f'"{IDENTITY}"')],
        extra_compile_args=["-O3", "-fopenmp-simd", "-fno-math-errno", *FLAGS_OF_PROCESSOR[processor]],
        libraries=["m"],
        optional=True,
    )


class BuildAnew(build_py):
    """Removes first what an earlier build left: files that are no longer among the sources must not be installed."""

    def run(self) -> None:
        is_apart = Path(self.build_lib).resolve() != Path("src").resolve()
        for path in Path(self.build_lib, "keepsight").rglob("*") if is_apart else ():
            if path.is_file() and not path.match("_cpu_kernels*.so"):
                path.unlink()
        super().run()


class BuildApart(build_ext):
    """Builds the libraries in parallel, each in its own folder, as their object files have the same names.

    A library of other sources is removed first: it must not stay where there is no compiler, nor count as up to date.
    """

    def run(self) -> None:
        for folder in (MODELS, Path(self.build_lib, *MODELS.parts[1:])):
            for library in folder.glob("_cpu_kernels*.so"):
                if not CPU_SOURCES["is_compiled_from"](IDENTITY, library):
                    library.unlink()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        build_ext.build_extension(own, ext)


setup(
    cmdclass={"build_py": BuildAnew, "build_ext": BuildApart},
    ext_modules=[_kernels(processor) for processor in FLAGS_OF_PROCESSOR],
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
