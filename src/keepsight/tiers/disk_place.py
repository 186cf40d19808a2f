"""Parses the location and size of a disk tier from the user's options."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepsight.checkpoint_folder import is_checkpoint
from keepsight.config import GIB, MOST_GIB
from keepsight.errors import InvalidArgumentError
from keepsight.tiers.cache_home import cache_home

DEFAULT_DISK_BYTES = 16 * GIB
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(K|M|G|T)?(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class DiskPlace:
    directory: Path
    max_bytes: int = DEFAULT_DISK_BYTES


def parse_disk_place(
    named: str | Literal[True], field: str = "--encoder-disk-cache", content: str = "embeddings"
) -> DiskPlace:
    """Parse PATH, PATH:SIZE or :SIZE, as in /var/cache/keepsight:64G; True: the default path, by `content`."""
    if named == "":
        # As with keys: an unset shell variable must not name a folder, which may be about to be cleared.
        raise InvalidArgumentError(field, "must not be empty")
    text = "" if named is True else named
    path, colon, size = text.rpartition(":")
    if not colon:
        path, size = text, ""
    try:
        directory = Path(path).expanduser().absolute() if path else cache_home() / content
    except RuntimeError as error:  # the user has no home
        what = f"{text!r} is not a folder" if path else "the default folder needs a home, or XDG_CACHE_HOME"
        raise InvalidArgumentError(field, f"{what}, give a full path: {error}") from error
    if is_checkpoint(directory):
        raise InvalidArgumentError(field, f"{directory} looks like a model, not a cache: it holds a config.json")
    return DiskPlace(directory, _parse_size(size, field) if colon else DEFAULT_DISK_BYTES)


def _parse_size(text: str, field: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    num_bytes = float(found[1]) * _UNITS[(found[2] or "").upper()] if found else 0.0
    if not 1 <= num_bytes <= MOST_GIB * GIB:
        raise InvalidArgumentError(field, f"must be PATH or PATH:SIZE with a size like 64G, not {text!r}")
    return int(num_bytes)
