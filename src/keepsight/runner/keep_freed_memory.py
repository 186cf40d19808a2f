"""What a step frees the next one allocates again: it shall not go back to the operating system in between.  And the
first ones shall find some.

By itself glibc returns what lies free at the end of its memory, from an amount that grows with the largest block ever
freed.  Until a picture was encoded each prompt of some hundred tokens paid for thousands of page faults, a quarter of
its time.  Concerns the whole process; whoever has told glibc in the environment how to behave is obeyed.
"""

import ctypes
import logging
import os

logger = logging.getLogger(__name__)
# glibc's names.  The first takes at most 32 MiB: larger blocks always come from the kernel, and go back to it.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_MIB = 2**20
# As steps of some hundred tokens take; with more of them, or of a larger model, it matters less.
_MIB_AHEAD = 96


def keep_freed_memory() -> bool:
    """Before threads that compute allocate.  Without glibc nothing happens.  Whether what is freed is kept."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _is_told_otherwise():
        return False
    # Of one arena: threads that compute in turn would each keep their own.
    for name, value in ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 256 * _MIB), (_ARENA_MAX, 1)):
        if not mallopt(name, value):
            logger.info("this C library keeps to its own rules: %d cannot be set", name)
            return False
    return True


def write_memory_ahead() -> None:
    """When the weights have their places, and what is freed is kept.

    By itself the memory of steps grows with every new length of a prompt.  Until some dozens had been seen, each prompt
    paid for hundreds of pages, a fifth of its time.
    """
    written = [b"\1" * _MIB for _ in range(_MIB_AHEAD)]
    del written


def give_back_memory() -> None:
    """When a model has gone.  By itself glibc gives back what is free at the end of its memory, and there may lie some
    small thing that is not: of a model of 0.5 GB, 0.7 GB stayed."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _is_told_otherwise() -> bool:
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
