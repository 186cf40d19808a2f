"""Host memory that a CUDA device reads by itself: page-locked for as long as anybody has it.

Each array gets pages of its own, as two that shared one could not both be locked; so a budget of bytes holds to a page.
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
    """None where the device needs none."""
    return PageLock(torch.cuda.cudart()) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class PageLock:
    """Used by several threads.  Where memory cannot be locked all goes on with what is there."""

    def __init__(self, runtime: Any) -> None:
        """`runtime`: CUDA's, as torch hands it out."""
        self._runtime = runtime
        self._has_failed = False
        # CUDA remembers a refusal for the thread that met with it, and torch blames the next kernel launched there.
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
        # Called before the memory goes, once no view of it is left; a process that ends unlocks its pages by itself.
        weakref.finalize(copy, self._runtime.cudaHostUnregister, address).atexit = False
        return replace(array, payload=copy.data)
