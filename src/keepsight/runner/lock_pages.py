"""Page-locks host memory, so that a CUDA device can read it directly, for as long as it is referenced.

Each array gets pages of its own, as two arrays that share a page cannot both be locked; so byte budgets are exact to a
page.
"""

import logging
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keepsight.tiers.tier import StoredArray

logger = logging.getLogger(__name__)
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable


def make_page_lock(device: torch.device) -> Callable[[StoredArray], StoredArray] | None:
    """Return a function that page-locks arrays; None if the device does not need it."""
    return PageLock(torch.cuda.cudart()) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class PageLock:
    """Copies arrays into page-locked memory; thread-safe. After a failure arrays are returned as they are."""

    def __init__(self, runtime: Any) -> None:
        """Initialize; `runtime` is the CUDA runtime, from torch."""
        self._runtime = runtime
        self._has_failed = False
        # CUDA keeps an error for the calling thread, and torch would attribute it to the next kernel launched there; so
        # a separate thread makes the calls.
        self._asking = ThreadPoolExecutor(1, "page-lock")

    def __call__(self, array: StoredArray) -> StoredArray:
        if self._has_failed or not array.num_bytes:
            return array
        pages = mmap.mmap(-1, array.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        copy = np.frombuffer(pages, np.uint8)
        copy[:] = np.frombuffer(array.payload, np.uint8)
        address = copy.ctypes.data
        asked = self._asking.submit(self._runtime.cudaHostRegister, address, array.num_bytes, _FOR_ALL_DEVICES)
        if status := int(asked.result()):
            self._has_failed = True
            logger.warning("host memory cannot be page-locked (CUDA error %d): loading takes longer", status)
            return array
        # Unlocks once no view is left, before the memory is freed; at exit the process unlocks its pages anyway.
        weakref.finalize(copy, self._runtime.cudaHostUnregister, address).atexit = False
        return replace(array, payload=copy.data)
