"""Chooses the folder that a process is started in.

The current one may be removed while a server runs, as that of an old release is. In a removed folder torch's libraries
cannot be loaded, and a process started there would end at once.
"""

from pathlib import Path


def start_folder(instead: Path) -> Path | None:
    """Return None, which means our own folder; if that was removed, return `instead`.

    `instead` should hold nothing that a relative path could mean.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        return instead
    return None
