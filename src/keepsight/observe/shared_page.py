"""Memory of a fixed size that is a file: whoever opens it next finds what lies there."""

import mmap
import os
from pathlib import Path


def open_shared_page(path: Path, num_bytes: int) -> mmap.mmap:
    """Raises OSError if there can be none."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Where memory has run out this fails; writing to the map would kill the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
