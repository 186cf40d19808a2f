"""Tests with a stand-in for the CUDA runtime that reports what is locked, and with CUDA itself where it exists."""

import gc
import mmap
import threading

import numpy as np
import pytest
import torch

from keepsight.runner.lock_pages import PageLock, make_page_lock
from keepsight.runner.stored_tensors import from_stored, to_stored
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.tier import StoredArray

KEYS = ("a" * 64, "b" * 64, "c" * 64)


class Runtime:
    """The two calls as torch exposes them; a range that touches a locked page is refused, as by CUDA."""

    def __init__(self, most: int = 100) -> None:
        self.locked: dict[int, int] = {}
        self._most = most
        self.num_asked = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.num_asked += 1
        assert address % mmap.PAGESIZE == 0
        assert flags == 1
        if len(self.locked) == self._most:
            return 2  # out of memory
        pages = range(address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE))
        for other, length in self.locked.items():
            last = -(-(other + length) // mmap.PAGESIZE)
            assert pages.stop <= other // mmap.PAGESIZE or last <= pages.start
        self.locked[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


def embeddings(number: int) -> StoredArray:
    return to_stored(torch.randn(37, 41, generator=torch.Generator().manual_seed(number)), seconds=0.5)


def test_a_locked_array_is_copied_to_pages_of_its_own() -> None:
    runtime = Runtime()
    given = embeddings(0)
    locked = PageLock(runtime)(given)
    assert locked.payload == given.payload
    assert (locked.dtype, locked.shape, locked.seconds) == (given.dtype, given.shape, given.seconds)
    assert locked.is_whole
    assert runtime.locked == {np.frombuffer(locked.payload, np.uint8).ctypes.data: given.num_bytes}


def test_pages_stay_locked_as_long_as_anything_reads_them() -> None:
    runtime = Runtime()
    locked = PageLock(runtime)(embeddings(0))
    tensor = from_stored(locked)
    del locked
    gc.collect()
    assert len(runtime.locked) == 1
    del tensor
    gc.collect()
    assert not runtime.locked


def test_a_host_tier_locks_what_it_holds_once_and_nothing_else() -> None:
    runtime, arrays = Runtime(), [embeddings(number) for number in range(3)]
    tier = HostTier(2 * arrays[0].num_bytes, "lru", move=PageLock(runtime))
    for key, array in zip(KEYS, arrays, strict=True):
        for _ in range(2):
            assert tier.put(key, tier.prepare(key, array))
    gc.collect()
    assert runtime.num_asked == 3
    assert len(runtime.locked) == 2
    held = tier.get(KEYS[2])
    assert held is not None
    assert held.payload == arrays[2].payload
    too_large = StoredArray("uint8", (10**6,), memoryview(bytes(10**6)))
    assert not tier.put("d" * 64, tier.prepare("d" * 64, too_large))
    assert runtime.num_asked == 3
    tier.check_invariants()
    del held
    tier.close()
    gc.collect()
    assert not runtime.locked


def test_pages_are_unlocked_when_the_tier_is_free_for_others_again() -> None:
    runtime, held_by_tier = Runtime(), []
    tier = HostTier(embeddings(0).num_bytes, "lru", move=PageLock(runtime))

    class Watched(dict[int, int]):
        def __delitem__(self, address: int) -> None:
            held_by_tier.append(tier._lock.locked())
            super().__delitem__(address)

    runtime.locked = Watched()
    for number, key in enumerate(KEYS):
        tier.put(key, tier.prepare(key, embeddings(number)))
    tier.clear()
    gc.collect()
    assert held_by_tier == [False, False, False]


def test_arrays_stay_unlocked_where_no_more_can_be_locked(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(most=1)
    lock = PageLock(runtime)
    arrays = [embeddings(number) for number in range(4)]
    locked = [lock(each) for each in arrays]
    assert [each.payload for each in locked] == [each.payload for each in arrays]
    assert runtime.num_asked == 2
    assert [record.getMessage() for record in caplog.records] == [
        "host memory cannot be page-locked (CUDA error 2): loading takes longer"
    ]


def test_arrays_are_never_locked_on_a_thread_that_may_launch_a_kernel() -> None:
    threads = []

    class Watched(Runtime):
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
            threads.append(threading.get_ident())
            return super().cudaHostRegister(address, num_bytes, flags)

    lock = PageLock(Watched(most=1))
    _held = [lock(embeddings(number)) for number in range(3)]
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_an_empty_array_is_not_locked() -> None:
    runtime, nothing = Runtime(), StoredArray("float32", (0, 5), memoryview(b""))
    assert PageLock(runtime)(nothing) is nothing
    assert not runtime.num_asked


def test_a_cpu_needs_no_locked_pages() -> None:
    assert make_page_lock(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE HERE: pages were locked by a stand-in alone")
def test_cuda_recognizes_locked_arrays_as_page_locked_memory() -> None:
    lock = make_page_lock(torch.device("cuda"))
    assert lock is not None
    given = embeddings(0)
    tensor = from_stored(lock(given))
    assert tensor.is_pinned()
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), from_stored(given))
