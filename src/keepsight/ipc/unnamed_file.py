"""Files that have no name until they are complete: a process killed while writing one leaves nothing behind."""

import os
from pathlib import Path


def open_unnamed(directory: Path) -> int:
    return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)


def give_name(descriptor: int, path: Path) -> None:
    """Link the file at `path`. Raises FileExistsError if the name is taken."""
    # `src_dir_fd` is ignored, as the path is absolute, but makes Python follow the link.
    os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
