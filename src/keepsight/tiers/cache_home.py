"""Where this user's programs keep what they could make again."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Ours there.  Raises RuntimeError for a user without a home, as containers have them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keepsight"
