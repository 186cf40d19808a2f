"""The counters of one process: a page of numbers, in memory that the other processes of its server can read.

Counting is one addition in memory: nothing is sent and no process is woken. Counts survive if the process is killed;
the successor of its rank continues from them. Invariant: each slot is changed by only one thread, or under a lock of
the code that counts.
"""

import mmap
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from keepsight.observe.catalogue import BOUNDS, GAUGES, NUM_SLOTS
from keepsight.observe.shared_page import share_or_keep

FOLDER = "counters"
# After the slots: the id of the process that owns the page.
PID = NUM_SLOTS
PAGE_BYTES = (NUM_SLOTS + 1) * 8


class Counters:
    def __init__(self, page: mmap.mmap | bytearray | None = None) -> None:
        """Without `page`, the counters are private to this process."""
        self._numbers = memoryview(bytearray(PAGE_BYTES) if page is None else page).cast("d")
        for slot in GAUGES:
            self._numbers[slot] = 0.0
        self._numbers[PID] = os.getpid()
        self._before = self._numbers.tolist()

    @classmethod
    def open(cls, run_directory: Path, process: str) -> Self:
        """Open the page of `process` (a kind and a rank), with the counts of the process that it replaces, if any."""
        if_kept = f"what {process} counts will be missing in the metrics"
        return cls(share_or_keep(run_directory, f"{FOLDER}/{process}", PAGE_BYTES, if_kept))

    def add(self, slot: int, amount: float = 1.0) -> None:
        self._numbers[slot] += amount

    def set(self, slot: int, value: float) -> None:
        """Set a gauge."""
        self._numbers[slot] = value

    def set_all(self, values: Mapping[int, float]) -> None:
        for slot, value in values.items():
            self.set(slot, value)

    def follow(self, slot: int, value: float) -> float:
        """Copy a count that other code in this process keeps from 0 on. Return its growth since the last call."""
        before, self._numbers[slot] = self._numbers[slot], self._before[slot] + value
        return self._numbers[slot] - before

    def observe(self, slot: int, seconds: float) -> None:
        """Add a value to a histogram."""
        self._numbers[slot + bisect_left(BOUNDS, seconds)] += 1.0
        self._numbers[slot + len(BOUNDS) + 1] += seconds

    def numbers(self) -> Sequence[float]:
        return self._numbers.tolist()
