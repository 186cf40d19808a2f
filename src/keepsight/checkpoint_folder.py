"""First checks of a checkpoint folder: that it is one, is readable, has not changed, and whether others are like it."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from keepsight.errors import CheckpointError, MissingCheckpointError

# By path: size and modification time. Not the inode number, which network file systems may change.
Files = Mapping[str, tuple[int, int]]
_SUFFIXES = (".safetensors", ".json", ".jinja")
# Of each file, evenly spread over it: training changes nearly all weights.
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def is_checkpoint(path: str | Path) -> bool:
    """Return whether `path` looks like a checkpoint folder."""
    # As a string: an empty path must not mean the current directory. And os.path never raises.
    return os.path.isfile(f"{path}/config.json")  # noqa: PTH113


def check_is_folder(directory: Path) -> None:
    """Raise CheckpointError unless `directory` is an accessible checkpoint folder."""
    try:
        # Stat an entry inside it: a folder may be visible while its contents are not accessible.
        os.stat(f"{directory}/.")  # noqa: PTH116 - a Path would drop the dot
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the path contains a NUL
        if os.path.isfile(directory):  # noqa: PTH113 - as above
            raise CheckpointError(directory, "is a file, not a checkpoint folder") from None
        raise MissingCheckpointError(directory) from None
    except OSError as error:
        raise CheckpointError(directory, f"cannot be accessed: {error.strerror}") from error
    if not is_checkpoint(directory):
        # Absolute: for `.`, the message would otherwise name no folder.
        raise CheckpointError(directory.absolute() / "config.json", "is missing, so its folder is not a checkpoint")


def list_files(*folders: Path) -> Files:
    """List the files that loading may read. Skips inaccessible ones: reading them reports the error."""
    found = {}
    for folder in folders:
        with suppress(OSError):
            for path in folder.iterdir():
                if path.suffix in _SUFFIXES and path.is_file():
                    about = path.stat()
                    found[str(path)] = (about.st_size, about.st_mtime_ns)
    return found


def check_is_unchanged(directory: Path, before: Files, *others: Path) -> None:
    """Raise CheckpointError if a file has changed since `before` was listed.

    The processes of one server must never load two models, or two adapters of one name. `others`: adapter folders.
    """
    check_is_folder(directory)
    if changed := before.items() ^ list_files(directory, *others).items():
        path, _ = min(changed)
        raise CheckpointError(path, "was changed since the server started: restart the server")


def digest_samples(directory: Path) -> str:
    """Digest parts of the files that loading may read, which takes milliseconds: enough to tell models apart."""
    hasher = blake3()
    for path, (size, _) in sorted(list_files(directory).items()):
        hasher.update(f"{Path(path).name}/{size}/".encode())
        with suppress(OSError), Path(path).open("rb") as file:  # loading may do without it, or reports it
            for start in range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES)):
                file.seek(start)
                hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest(8)
