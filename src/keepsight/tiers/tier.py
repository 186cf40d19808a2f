"""The interface of a tier: a place where embeddings, or keys and values, outlive the device's memory.

A tier knows keys and bytes, but neither tensors nor its clients. Invariant of all tiers: `get` returns what was put
under that key, bit for bit, or None.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

# Called with a key that a tier is no longer known to hold, on any thread; must neither block nor call back.
OnDrop = Callable[[str], object]


def ignore_drop(_key: str) -> None:
    pass


# Bytes per element of each dtype that can be stored.
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "uint8": 1, "int32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array's bytes. Never modified, as all that have it share its memory."""

    dtype: str
    shape: tuple[int, ...]
    # Row-major. The memory it lies in, which may be pinned, lives as long as this.
    payload: memoryview
    # The time it took to compute.
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        return self.payload.nbytes

    @property
    def is_whole(self) -> bool:
        """True if the payload is contiguous bytes, as many as its dtype and shape say."""
        is_bytes = self.payload.format == "B" and self.payload.ndim == 1 and self.payload.c_contiguous
        return is_bytes and self.num_bytes == ELEMENT_BYTES.get(self.dtype, -1) * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TierStats:
    """`max_bytes` is None if only the server has a limit; `num_bytes` and `num_entries` are as far as known here."""

    num_bytes: int
    max_bytes: int | None
    num_entries: int
    num_evictions: int = 0
    # Entries that differed from what had been put: each was a miss, and was removed.
    num_damaged: int = 0


class Tier(Protocol):
    """Used by several threads. Methods that do I/O may block, and raise OSError or TierError on failure."""

    @property
    def name(self) -> str: ...

    def open(self) -> None:
        """Find out whether the tier can be used. Optional: other methods open the tier themselves if needed."""

    def has(self, key: str) -> bool:
        """Return whether the key is known to be held, without I/O; `get` may also find keys that are not known."""

    def get(self, key: str) -> StoredArray | None:
        """Return the entry, or None. Counts as a use."""

    def put(self, key: str, array: StoredArray) -> bool:
        """Store an entry. Return whether it is held now: False if it is larger than the tier or finds no room there."""

    def note_use(self, key: str) -> None:
        """Note a use without a `get`. Does nothing if the server decides the eviction order."""

    def clear(self) -> None: ...

    def stats(self) -> TierStats:
        """Return the numbers known here, without I/O."""

    def close(self) -> None: ...
