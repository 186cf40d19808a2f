"""What one process knows of the files of a disk tier: their sizes, their last uses, and which to evict next.

May be outdated if other processes share the folder. Thread-safe. Invariants: `num_bytes` is the total of all files; the
file chosen for eviction is not pinned.
"""

import threading
from collections.abc import Set
from dataclasses import dataclass, replace

from keepsight.tiers.policies import Policy
from keepsight.tiers.tier import OnDrop


@dataclass(frozen=True, slots=True)
class _File:
    num_bytes: int
    # Time its entry took to compute.
    seconds: float
    last_use: int


class KnownFiles:
    def __init__(self, policy: Policy, on_drop: OnDrop) -> None:
        """`on_drop` is called with keys that are no longer known to be held."""
        # The policy knows only files that are not pinned.
        self._policy, self._on_drop = policy, on_drop
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
        self._pinned: Set[str] = frozenset()
        # A running total: each entry put into a full folder needs it, and there may be hundreds of thousands of files.
        self.num_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def sizes(self) -> dict[str, int]:
        with self._lock:
            return {key: file.num_bytes for key, file in self._files.items()}

    def size_of(self, key: str) -> int | None:
        """Return its size as it was counted: a damaged file may have any."""
        file = self._files.get(key)
        return None if file is None else file.num_bytes

    def last_use_of(self, key: str) -> int | None:
        file = self._files.get(key)
        return None if file is None else file.last_use

    def learn(self, key: str, num_bytes: int, seconds: float, last_use: int) -> None:
        """Note that a file exists and was used. `seconds` counts only if the file was not known."""
        with self._lock:
            known = self._files.get(key)
            self._files[key] = _File(num_bytes, known.seconds if known else seconds, last_use)
            self.num_bytes += num_bytes - (known.num_bytes if known else 0)
            if key in self._pinned:
                return
            if known:
                self._policy.use(key)
            else:
                self._policy.add(key, num_bytes, seconds)

    def note_use(self, key: str, last_use: int) -> None:
        with self._lock:
            if (known := self._files.get(key)) is not None:
                self._files[key] = replace(known, last_use=last_use)
                if key not in self._pinned:
                    self._policy.use(key)

    def spare(self, pinned: Set[str]) -> None:
        """Set the pinned keys. A file that is no longer pinned counts as new."""
        with self._lock:
            for key in self._files.keys() & (pinned - self._pinned):
                self._policy.remove(key)
            for key in self._files.keys() & (self._pinned - pinned):
                self._policy.add(key, self._files[key].num_bytes, self._files[key].seconds)
            self._pinned = pinned

    def choose(self) -> tuple[str, int] | None:
        """Choose the file to evict and forget it. Return its key and its size; None if all are pinned."""
        with self._lock:
            if not len(self._policy):
                return None
            key = self._policy.evict()
            num_bytes = self._files.pop(key).num_bytes
            self.num_bytes -= num_bytes
        self._on_drop(key)
        return key, num_bytes

    def forget(self, key: str) -> None:
        with self._lock:
            if key not in self._files:
                return
            self.num_bytes -= self._files.pop(key).num_bytes
            if key not in self._pinned:
                self._policy.remove(key)
        self._on_drop(key)

    def check_invariants(self) -> None:
        with self._lock:
            assert self.num_bytes == sum(file.num_bytes for file in self._files.values())
            assert len(self._policy) == len(self._files.keys() - self._pinned)
            assert all((key in self._policy) != (key in self._pinned) for key in self._files)
