"""What one process knows of the files of a disk tier: their sizes and last uses, and which had best go next.

May be outdated where other processes share the folder.  Used from any thread.  Invariant: `num_bytes` are those of all.
"""

import threading
from collections.abc import Set

from keepsight.tiers.pins import Sparing
from keepsight.tiers.policies import Policy
from keepsight.tiers.tier import OnDrop


class KnownFiles:
    def __init__(self, policy: Policy, on_drop: OnDrop) -> None:
        """`on_drop` hears of what is known no more to lie there."""
        self._policy, self._on_drop = Sparing(policy), on_drop
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._last_uses: dict[str, int] = {}
        # Kept along: each entry that comes into a full folder asks for them, and there may be hundreds of thousands.
        self.num_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def sizes(self) -> dict[str, int]:
        with self._lock:
            return dict(self._sizes)

    def last_use_of(self, key: str) -> int | None:
        return self._last_uses.get(key)

    def learn(self, key: str, num_bytes: int, seconds: float, last_use: int) -> None:
        """It is there, and was used."""
        with self._lock:
            if key in self._sizes:
                self._policy.use(key)
            else:
                self._policy.add(key, num_bytes, seconds)
            self.num_bytes += num_bytes - self._sizes.get(key, 0)
            self._sizes[key] = num_bytes
            self._last_uses[key] = last_use

    def spare(self, pinned: Set[str]) -> None:
        with self._lock:
            self._policy.spare(pinned)

    def choose(self) -> str | None:
        """What is to go, and is known no more; None if all is spared."""
        with self._lock:
            if not self._policy.num_evictable:
                return None
            key = self._policy.evict()
            self._drop(key)
        self._on_drop(key)
        return key

    def forget(self, key: str) -> None:
        with self._lock:
            if key not in self._sizes:
                return
            self._drop(key)
            self._policy.remove(key)
        self._on_drop(key)

    def _drop(self, key: str) -> None:
        self.num_bytes -= self._sizes.pop(key)
        del self._last_uses[key]

    def check_invariants(self) -> None:
        with self._lock:
            assert self.num_bytes == sum(self._sizes.values())
            assert len(self._policy) == len(self._sizes) == len(self._last_uses)
            assert all(key in self._policy and key in self._last_uses for key in self._sizes)
            self._policy.check_invariants()
