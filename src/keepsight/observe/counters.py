"""What one process counts: a page of numbers, in memory that the other processes of its server can read.

A count is one addition in memory: nothing is sent, nobody is woken, and what was counted stays when the process is
killed, for the successor of its rank goes on from there.  Invariant: each slot is changed by one thread, or under a
lock of whoever counts.
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
# Behind the slots: whose they are.
PID = NUM_SLOTS
PAGE_BYTES = (NUM_SLOTS + 1) * 8


class Counters:
    def __init__(self, page: mmap.mmap | bytearray | None = None) -> None:
        """Without a page, in this process alone."""
        self._numbers = memoryview(bytearray(PAGE_BYTES) if page is None else page).cast("d")
        for slot in GAUGES:
            self._numbers[slot] = 0.0
        self._numbers[PID] = os.getpid()
        self._before = self._numbers.tolist()

    @classmethod
    def open(cls, run_directory: Path, process: str) -> Self:
        """The page of `process`, as a kind and a rank: of this one, or of the one that it replaces."""
        path = run_directory / FOLDER / process
        return cls(share_or_keep(path, PAGE_BYTES, f"what {process} counts will be missing in the metrics"))

    def add(self, slot: int, amount: float = 1.0) -> None:
        self._numbers[slot] += amount

    def set(self, slot: int, value: float) -> None:
        """Of a gauge."""
        self._numbers[slot] = value

    def set_all(self, values: Mapping[int, float]) -> None:
        for slot, value in values.items():
            self.set(slot, value)

    def follow(self, slot: int, value: float) -> float:
        """Of what somebody else in this process counts from 0 on: by how much that has grown since it was followed."""
        before, self._numbers[slot] = self._numbers[slot], self._before[slot] + value
        return self._numbers[slot] - before

    def observe(self, slot: int, seconds: float) -> None:
        """Of a histogram."""
        self._numbers[slot + bisect_left(BOUNDS, seconds)] += 1.0
        self._numbers[slot + len(BOUNDS) + 1] += seconds

    def numbers(self) -> Sequence[float]:
        return self._numbers.tolist()
