"""Pins of entries that stay in a disk tier's folder, whatever the policy says.

A pin is an empty file named by the entry's key: it outlives processes, and all that share the folder see it. It applies
to the name, so an entry that was damaged or cleared is pinned again as soon as it is stored again.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class PinFolder:
    """Eviction lists the pins under the ledger's lock: once that lock was taken after pinning, the pin is in effect."""

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
