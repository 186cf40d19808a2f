"""Tunes glibc so that memory freed by one step stays in the process for the next; the first steps find some, too.

By default glibc returns free memory at the end of its heap above a threshold, which grows with the largest block ever
freed. Until a picture was encoded, each prompt of some hundred tokens paid for thousands of page faults, a quarter of
its time. Affects the whole process; settings for glibc in the environment take precedence.
"""

import ctypes
import logging
import os

logger = logging.getLogger(__name__)
# glibc's constants. The first may be at most 32 MiB: larger blocks always come from the kernel and go back to it.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_MIB = 2**20
# What steps of some hundred tokens take; for longer ones, or a larger model, it matters less.
_MIB_AHEAD = 96


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory; call it before computing threads allocate. Return whether it took effect."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _is_set_in_environment():
        return False
    # With one arena, as threads that compute in turn would each keep memory of their own.
    for name, value in ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 256 * _MIB), (_ARENA_MAX, 1)):
        if not mallopt(name, value):
            logger.info("this C library does not allow setting the malloc option %d", name)
            return False
    return True


def write_memory_ahead() -> None:
    """Touch memory for the first steps; call it once the weights are allocated and freed memory is kept.

    Otherwise the memory of steps grows with every new prompt length. Until some dozens had been seen, each prompt paid
    for hundreds of pages, a fifth of its time.
    """
    written = [b"\1" * _MIB for _ in range(_MIB_AHEAD)]
    del written


def give_back_memory() -> None:
    """Return free memory to the operating system after a model is gone.

    By default glibc returns only what is free at the end of its heap, where a small live block may be in the way: after
    a model of 0.5 GB, 0.7 GB stayed allocated.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _is_set_in_environment() -> bool:
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
