"""Whether a checkpoint's folder is there and can be looked into: the first that is asked of it, by whoever reads it."""

import os
from pathlib import Path

from keepsight.errors import CheckpointError, MissingCheckpointError


def check_is_folder(directory: Path) -> None:
    """Raises CheckpointError."""
    try:
        # In it, not at it: one may see that there is a folder, and nothing of what lies there.
        os.stat(f"{directory}/.")  # noqa: PTH116 - a Path would drop the dot
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no name has a NUL
        raise MissingCheckpointError(directory) from None
    except OSError as error:
        raise CheckpointError(directory, f"cannot be looked into: {error.strerror}") from error
