"""Memory of a fixed size that is backed by a file: its content is there when it is opened again."""

import logging
import mmap
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def open_shared_page(run_directory: Path, name: str, num_bytes: int) -> mmap.mmap:
    """Map the file of this name in the run directory, or in a folder there; both are created if needed.

    Raises OSError if that is impossible. A run directory that was removed is not made again: nobody would lock it.
    """
    path = run_directory / name
    if path.parent != run_directory:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Fails if there is no memory left; otherwise, writing to the map would kill the process.
        os.posix_fallocate(descriptor, 0, num_bytes)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def share_or_keep(run_directory: Path, name: str, num_bytes: int, if_kept: str) -> mmap.mmap | bytearray:
    """Open a shared page, or fall back to private memory and log `if_kept`, the consequence."""
    try:
        return open_shared_page(run_directory, name, num_bytes)
    except OSError as error:
        logger.warning("%s: %s", if_kept, error)
        return bytearray(num_bytes)
