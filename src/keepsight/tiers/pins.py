"""What is to stay in a folder of entries, whatever the policy says, and a policy that heeds it.

A pin is an empty file named by the entry's key: it outlives processes, and all who share the folder see it.  It is of
the name, so what was damaged or cleared is pinned again as soon as it is there again.  Invariant: what a `Sparing`
policy names to go is not pinned.
"""

import os
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path

from keepsight.tiers.policies import Policy


class PinFolder:
    """Whoever evicts lists it under the ledger's lock: who got that lock after pinning finds that it holds."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "pins"

    def list(self) -> frozenset[str]:
        try:
            with os.scandir(self._folder) as found:
                return frozenset(each.name for each in found)
        except FileNotFoundError:
            return frozenset()

    def add(self, keys: Iterable[str]) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for key in keys:
            (self._folder / key).touch(mode=0o600)

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError):
                (self._folder / key).unlink()


class Sparing:
    """The order of another policy, which knows only what is not pinned."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # Bytes and seconds, for when a pin goes.
        self._held: dict[str, tuple[int, float]] = {}
        self._pinned: Set[str] = frozenset()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_evictable(self) -> int:
        return len(self._policy)

    def spare(self, pinned: Set[str]) -> None:
        """These from now on, and no others.  What is pinned no more counts as new."""
        for key in self._held.keys() & (pinned - self._pinned):
            self._policy.remove(key)
        for key in self._held.keys() & (self._pinned - pinned):
            self._policy.add(key, *self._held[key])
        self._pinned = pinned

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        self._held[key] = (num_bytes, seconds)
        if key not in self._pinned:
            self._policy.add(key, num_bytes, seconds)

    def use(self, key: str) -> None:
        if key not in self._pinned:
            self._policy.use(key)

    def remove(self, key: str) -> None:
        del self._held[key]
        if key not in self._pinned:
            self._policy.remove(key)

    def evict(self) -> str:
        """Something must be evictable."""
        key = self._policy.evict()
        del self._held[key]
        return key

    def check_invariants(self) -> None:
        assert len(self._policy) == len(self._held.keys() - self._pinned)
        assert all((key in self._policy) != (key in self._pinned) for key in self._held)
