"""Where this user's programs keep what they could make again."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Ours there.  Raises RuntimeError for a user without a home, as containers have them."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # A relative one is to be ignored, by XDG's specification: each folder that one happens to be in would have another.
    return (named if named.is_absolute() else Path.home() / ".cache") / "keepsight"
