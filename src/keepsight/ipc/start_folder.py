"""Which folder a process is started in.

One may be removed while a server runs, as an old release is: in it libraries of torch's cannot be loaded, and what was
started there would end at once.
"""

from pathlib import Path


def start_folder(instead: Path) -> Path | None:
    """None is ours; `instead`, where nothing lies that a relative path could mean, if that was removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return instead
    return None
