"""Checks of a disk tier's folders: that they are not links to nothing, and who else may read and replace files."""

import logging
import os
import stat
from pathlib import Path

from keepsight.errors import TierError

logger = logging.getLogger(__name__)


def refuse_dangling(folder: Path) -> None:
    if folder.is_symlink() and not folder.exists():
        raise TierError(f"it is a link to {folder.readlink()}, which does not exist")


def refuse_if_shared(folder: Path) -> None:
    about = folder.stat()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise TierError(f"{folder} must be this user's and closed to others: it holds data derived from requests")


def warn_if_open(folder: Path) -> None:
    """Warn if others can replace files. No refusal: a container's user may not own a volume mounted into it."""
    about = folder.stat()
    all_write = about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX
    if all_write or about.st_uid not in (0, os.geteuid()):
        whose = "everyone can write to it" if all_write else f"it belongs to user {about.st_uid}"
        logger.warning("others can change answers by replacing files in %s: %s", folder, whose)
