"""Memory of a fixed size that is a file: whoever opens it next finds what lies there."""

import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)


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


def share_or_keep(path: Path, num_bytes: int, if_kept: str) -> mmap.mmap | bytearray:
    """Memory of this process alone where there can be none; `if_kept` says what that means."""
    try:
        return open_shared_page(path, num_bytes)
    except OSError as error:
        logger.warning("%s: %s", if_kept, error)
        return bytearray(num_bytes)
