"""What a step frees the next one allocates again: it shall not go back to the operating system in between.

By itself glibc returns what lies free at the end of its memory, from an amount that grows with the largest block ever
freed.  Until a picture was encoded each prompt of some hundred tokens paid for thousands of page faults, a quarter of
its time.  Concerns the whole process, so only one that is all an engine's asks for it.
"""

import ctypes
import logging

logger = logging.getLogger(__name__)
# glibc's names.  The first takes at most 32 MiB: larger blocks always come from the kernel, and go back to it.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8
_MIB = 2**20


def keep_freed_memory() -> None:
    """Before other threads allocate.  Without glibc nothing happens; what the environment says of it is overruled."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Of one arena: threads that compute in turn would each keep their own.
    for name, value in ((_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 512 * _MIB), (_ARENA_MAX, 1)):
        if not mallopt(name, value):
            logger.info("this C library keeps to its own rules: %d cannot be set", name)
