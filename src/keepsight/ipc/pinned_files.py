"""Names of files that are pinned until some time: an empty file for each, whose mtime is that time, for all processes.

Knows nothing of the pinned files. Invariant: no pin is ever seen with an mtime other than its end.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from keepsight.ipc.unnamed_file import give_name, open_unnamed


class PinnedFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return self._end_of(name) > time.monotonic_ns()

    def __iter__(self) -> Iterator[str]:
        """Iterate over all pins, including those that have ended."""
        return (pin.name for pin in self._folder.glob("*"))

    def add(self, name: str, seconds: float) -> None:
        """Pin for `seconds` from now, whatever its end was. Raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        end = time.monotonic_ns() + int(seconds * 1e9)
        if self._end_of(name):
            os.utime(self._folder / name, ns=(end, end))
            return
        descriptor = open_unnamed(self._folder)
        try:
            os.utime(descriptor, ns=(end, end))
            give_name(descriptor, self._folder / name)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def _end_of(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_mtime_ns
        except FileNotFoundError:
            return 0
