"""Names of files to evict before others: an empty file for each, in a folder that all processes of a server share.

A mark is a hint, and never fails: it may name a file that is gone, and one that cannot be written is left out.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class MarkedFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)

    def __iter__(self) -> Iterator[str]:
        """Iterate in no particular order."""
        with suppress(FileNotFoundError), os.scandir(self._folder) as found:
            for each in found:
                yield each.name

    def add(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).touch(mode=0o600)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            (self._folder / name).unlink()

    def clear(self) -> None:
        for name in list(self):
            self.remove(name)
