"""What a tier is: a place where embeddings, or keys and values, outlive the device's memory.

A tier knows names and bytes; neither tensors, nor who asks.  Invariant of all: `get` gives what was put under that
key, bit for bit, or None.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Called with the key of what a tier is not known to hold any more, on any thread; must neither wait nor call back.
OnDrop = Callable[[str], object]


def ignore_drop(_key: str) -> None:
    pass


# Bytes of an element of each type that is kept.
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "uint8": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """Never changed by anybody, as all who have it share its memory."""

    dtype: str
    shape: tuple[int, ...]
    # In the order of the shape.  Whatever memory it lies in, pinned memory too, lives as long as this.
    payload: memoryview
    # What it took to compute.
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        return self.payload.nbytes

    @property
    def is_whole(self) -> bool:
        """It is bytes, in one piece, as many as its type and shape say."""
        is_bytes = self.payload.format == "B" and self.payload.ndim == 1 and self.payload.c_contiguous
        return is_bytes and self.num_bytes == ELEMENT_BYTES.get(self.dtype, -1) * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TierStats:
    """`max_bytes` is None where the budget is the server's own; `num_bytes` and `num_entries` as far as known here."""

    num_bytes: int
    max_bytes: int | None
    num_entries: int
    num_evictions: int = 0
    # Entries that were not what had been put: each a miss, and removed.
    num_damaged: int = 0


class Tier(Protocol):
    """Used by several threads.  What does input or output may wait, and raises OSError or TierError if it cannot."""

    @property
    def name(self) -> str: ...

    def open(self) -> None:
        """Finds out whether it can be used.  Nothing needs it: whatever else is asked for opens it too."""

    def has(self, key: str) -> bool:
        """Whether it is known to be held, without asking anybody; `get` may find what is not known."""

    def get(self, key: str) -> StoredArray | None:
        """Counts as a use."""

    def put(self, key: str, array: StoredArray) -> bool:
        """Whether it is held now; False if it is larger than the tier, or finds no room there."""

    def note_use(self, key: str) -> None:
        """It served, though it was not got.  Where the order is a server's own, nothing."""

    def clear(self) -> None: ...

    def stats(self) -> TierStats:
        """Without asking anybody."""

    def close(self) -> None: ...
