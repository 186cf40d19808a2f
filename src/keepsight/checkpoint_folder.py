"""What is asked first of a checkpoint's folder: whether it is one, can be looked into, and is what it was."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from keepsight.errors import CheckpointError, MissingCheckpointError

# By path: its size, and the time of its content's last change.  Not its inode, which network file systems make up anew.
Files = Mapping[str, tuple[int, int]]
_SUFFIXES = (".safetensors", ".json", ".jinja")


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


def list_files(*folders: Path) -> Files:
    """Of those that are read; without what cannot be looked at, as whoever reads it will say."""
    found = {}
    for folder in folders:
        with suppress(OSError):
            for path in folder.iterdir():
                if path.suffix in _SUFFIXES and path.is_file():
                    about = path.stat()
                    found[str(path)] = (about.st_size, about.st_mtime_ns)
    return found


def check_is_unchanged(directory: Path, before: Files, *others: Path) -> None:
    """Raises CheckpointError: the processes of one server must never be of two models, nor of two adapters of a name.

    `others`: the folders of those.
    """
    check_is_folder(directory)
    if changed := before.items() ^ list_files(directory, *others).items():
        path, _ = min(changed)
        raise CheckpointError(path, "was changed since the server started: start the server anew")
