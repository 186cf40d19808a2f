"""What is compiled for the CPU when the package is installed, of which this loads what its processor takes.

Where it could not be compiled there is no library, and all is torch's own.
"""

import ctypes
import functools
import logging
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger(__name__)

_NAMES = ("norm", "angles", "attend", "attend_rounded", "multiply", "take_rows", "decode", "wide_rows")
# The best first; the last is for any processor.
_BUILDS = ("_cpu_kernels_avx512", "_cpu_kernels_avx2", "_cpu_kernels")
# How many are too good for what torch says that the processor can do.
_TOO_GOOD = {"AVX512": 0, "AVX2": 1}


def has_library() -> bool:
    return _library() is not None


def call(name: str, work: ctypes.Structure) -> None:
    """A function, without its prefix, and all that it is told."""
    _function(name)(ctypes.byref(work))


@functools.cache
def number(name: str) -> int:
    """What the library says of itself, or of its processor."""
    return ctypes.c_long.in_dll(_found(), f"keepsight_{name}").value


@functools.cache
def _function(name: str) -> Any:
    function = getattr(_found(), f"keepsight_{name}")
    function.restype = None
    return function


@functools.cache
def _library() -> ctypes.CDLL | None:
    builds = _BUILDS[_TOO_GOOD.get(torch.backends.cpu.get_cpu_capability(), 2) :]
    path = next((spec.origin for build in builds if (spec := find_spec(f"keepsight.models.{build}"))), None)
    if path is None:
        logger.warning("No kernels for the CPU: there was no compiler when this was installed; torch's are slower")
        return None
    try:
        library = ctypes.CDLL(path)
        for name in _NAMES:  # one of before may be left
            getattr(library, f"keepsight_{name}")
    except (OSError, AttributeError) as error:
        logger.warning("The kernels for the CPU do not fit here (%s); torch's are slower", error)
        return None
    return library


def _found() -> ctypes.CDLL:
    library = _library()
    assert library is not None
    return library
