"""A set of names that processes share and that outlives them: an empty file for each name, in one folder."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class SharedNames:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[str]:
        """Iterate in no particular order."""
        with suppress(FileNotFoundError), os.scandir(self.folder) as found:
            for each in found:
                yield each.name

    def add(self, *names: str) -> None:
        """Add names, creating the folder if needed. Raises OSError."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name in names:
            (self.folder / name).touch(mode=0o600)

    def remove(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
