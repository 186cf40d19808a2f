"""What lies in the folders of a disk tier: files, their sizes, their last uses, and what their entries took to compute.

Knows neither budgets nor locks: what it returns may be outdated at once.
"""

import fcntl
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from keepsight.ipc.record_lock import opened
from keepsight.tiers.entry_format import HEADER_BYTES, read_seconds
from keepsight.tiers.entry_key import is_entry_key

# A foreign file, such as a pipe, must not make its reader wait.
READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class TierFile(NamedTuple):
    """Sorted by their last use."""

    last_use: int
    name: str
    num_bytes: int


def files_in(folder: Path) -> list[TierFile]:
    """Return all files but stray folders, which do not count against a budget, and cannot be removed like a file."""
    files = []
    with suppress(FileNotFoundError), os.scandir(folder) as found:
        for each in found:
            with suppress(FileNotFoundError):
                if not each.is_dir(follow_symlinks=False):
                    about = each.stat(follow_symlinks=False)
                    files.append(TierFile(about.st_mtime_ns, each.name, occupied(about.st_size)))
    return files


def entries_in(folder: Path) -> list[TierFile]:
    """Return the files that are named like entries."""
    return [file for file in files_in(folder) if is_entry_key(file.name)]


def seconds_of(path: Path) -> float:
    """Return the time the entry took to compute; 0 if it cannot be read, so that it is evicted first."""
    try:
        with opened(path, READING) as descriptor:
            return read_seconds(path.name, os.pread(descriptor, HEADER_BYTES, 0)) or 0.0
    except OSError:
        return 0.0


def remove_dead(path: Path) -> None:
    """Remove an unfinished file unless the process that writes it lives."""
    with suppress(FileNotFoundError, BlockingIOError), opened(path, os.O_RDWR) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()


def occupied(num_bytes: int) -> int:
    """Return the bytes that a file of that size occupies: file systems allocate whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
