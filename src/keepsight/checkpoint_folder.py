"""What is asked first of a checkpoint's folder: whether it is one, is there, and can be looked into."""

import os
from pathlib import Path

from keepsight.errors import CheckpointError, MissingCheckpointError


def is_checkpoint(path: str | Path) -> bool:
    """Whether it looks like one."""
    # As a text: no path at all is not the folder that one happens to be in.  And os.path never raises.
    return os.path.isfile(f"{path}/config.json")  # noqa: PTH113


def check_is_folder(directory: Path) -> None:
    """Raises CheckpointError."""
    try:
        # In it, not at it: one may see that there is a folder, and nothing of what lies there.
        os.stat(f"{directory}/.")  # noqa: PTH116 - a Path would drop the dot
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no name has a NUL
        if os.path.isfile(directory):  # noqa: PTH113 - as above
            raise CheckpointError(directory, "is a file, not a checkpoint's folder") from None
        raise MissingCheckpointError(directory) from None
    except OSError as error:
        raise CheckpointError(directory, f"cannot be looked into: {error.strerror}") from error
    if not is_checkpoint(directory):
        # In full: a file in `.` would be told without any folder.
        raise CheckpointError(directory.absolute() / "config.json", "is missing, so its folder is no checkpoint")
