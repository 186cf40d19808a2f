"""Loads the CPU kernels, compiled when the package is installed, in the best build that this processor can run.

If they could not be compiled there is no library, and torch's operations are used.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from keepsight.models.cpu_sources import identify_sources, is_compiled_from

logger = logging.getLogger(__name__)

_NAMES = (
    *("norm", "angles", "attend", "multiply", "take_rows"),
    *("decode", "place_team", "compute_delta_net"),
    *("runs_here", "gains_by_rounding", "attends_to_all", "wide_rows", "products_of_layer", "lanes", "refusals"),
)
# The best first; the last runs on any processor.
BUILDS = ("_cpu_kernels_amx", "_cpu_kernels_avx512", "_cpu_kernels_avx2", "_cpu_kernels")
# How many builds to skip for the CPU capability that torch reports; it does not report tiles (AMX).
_NUM_SKIPPED = {"AVX512": 0, "AVX2": 2}


def has_library() -> bool:
    return _library() is not None


def name_of_build() -> str:
    """Return the name of the loaded build. Results of different builds differ in their last bits."""
    library = _library()
    return "torch" if library is None else Path(library._name).name.partition(".")[0]


def call(name: str, work: ctypes.Structure) -> None:
    """Call the function of that name (without its prefix) with the struct of its arguments.

    Raises OutOfMemoryError if memory was refused meanwhile, to this or another thread's call: results may be missing.
    """
    function, refusals = _function(name)
    before = refusals.value
    function(ctypes.byref(work))
    if refusals.value != before:
        raise torch.OutOfMemoryError("The kernels for the CPU can't allocate memory")


@functools.cache
def number(name: str) -> int:
    """Return a constant that the library exports, about itself or the processor."""
    return _variable(_found(), name).value


@functools.cache
def _function(name: str) -> tuple[Any, ctypes.c_long]:
    """Return a function of the library and its count of refusals."""
    library = _found()
    function = getattr(library, f"keepsight_{name}")
    function.restype = None
    return function, _variable(library, "refusals")


def builds_for_this_processor() -> Sequence[str]:
    return BUILDS[_NUM_SKIPPED.get(torch.backends.cpu.get_cpu_capability(), len(BUILDS) - 1) :]


@functools.cache
def _library() -> ctypes.CDLL | None:
    specs = [find_spec(f"keepsight.models.{build}") for build in builds_for_this_processor()]
    paths = [Path(spec.origin) for spec in specs if spec and spec.origin]
    if not paths:
        logger.warning("No kernels for the CPU: there was no compiler at installation; torch's are slower")
    are_ours = {path: is_ours for path in paths if (is_ours := _try_compare(path)) is not None}
    if not all(are_ours.values()):
        what = "are those of another version and are not used"
        logger.warning("The kernels for the CPU %s: install keepsight again (`make install` or `pip install`)", what)
    return next((library for path, is_ours in are_ours.items() if is_ours and (library := _load(path))), None)


def _try_compare(path: Path) -> bool | None:
    """Return whether a library was compiled from the sources beside this file; None if one of them cannot be read."""
    try:
        return is_compiled_from(identify_sources(Path(__file__).parent), path)
    except OSError as error:  # it is being replaced, or closed to the server's user
        logger.warning("The kernels for the CPU in %s cannot be read (%s)", path, error)
        return None


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(path))
        for name in _NAMES:
            getattr(library, f"keepsight_{name}")
    except (OSError, AttributeError) as error:
        logger.warning("The kernels for the CPU in %s do not fit here (%s)", path, error)
        return None
    return library if _variable(library, "runs_here").value else None


def _variable(library: ctypes.CDLL, name: str) -> ctypes.c_long:
    return ctypes.c_long.in_dll(library, f"keepsight_{name}")


def _found() -> ctypes.CDLL:
    library = _library()
    assert library is not None
    return library
