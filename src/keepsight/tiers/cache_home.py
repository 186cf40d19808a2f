"""Locates the user's cache directory, for files that can be made again."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Return Keepsight's cache directory. Raises RuntimeError for a user without a home, as in containers."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path: it would differ with the working directory.
    return (named if named.is_absolute() else Path.home() / ".cache") / "keepsight"
