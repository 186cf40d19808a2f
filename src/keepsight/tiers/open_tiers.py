"""From what a server was told to the store over its tiers.

Invariant: nobody waits for a folder or server here; one that cannot be used is set aside soon, and tried again.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepsight.checkpoint_folder import is_checkpoint
from keepsight.errors import InvalidArgumentError
from keepsight.tiers.cache_home import cache_home
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.redis_tier import RedisTier
from keepsight.tiers.tier import OnDrop, StoredArray, Tier, ignore_drop
from keepsight.tiers.tiered_store import TieredStore

DEFAULT_DISK_BYTES = 16 * 2**30
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(K|M|G|T)?(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class DiskPlace:
    directory: Path
    max_bytes: int = DEFAULT_DISK_BYTES


@dataclass(frozen=True, slots=True)
class RemotePlace:
    url: str
    # None: as much as the server takes.
    max_bytes: int | None = None


def default_disk_directory(content: str) -> Path:
    return cache_home() / content


def parse_disk_place(text: str, field: str = "--encoder-disk-cache", content: str = "embeddings") -> DiskPlace:
    """PATH, PATH:SIZE or :SIZE, as in /var/cache/keepsight:64G; without a path, where such `content` usually lies."""
    path, colon, size = text.rpartition(":")
    if not colon:
        path, size = text, ""
    try:
        directory = Path(path).expanduser().absolute() if path else default_disk_directory(content)
    except RuntimeError as error:  # the user has no home
        raise InvalidArgumentError(field, f"{text!r} is no folder, name one by its whole path: {error}") from error
    if is_checkpoint(directory):
        raise InvalidArgumentError(field, f"{directory} looks like a model, not like a cache: it holds a config.json")
    return DiskPlace(directory, _parse_size(size, field) if colon else DEFAULT_DISK_BYTES)


def open_tiers(
    host_bytes: int = 0,
    disk: DiskPlace | None = None,
    remote: RemotePlace | None = None,
    *,
    policy: str = "auto",
    keeps_first: bool = False,
    on_drop: OnDrop = ignore_drop,
    move_in_host: Callable[[StoredArray], StoredArray] | None = None,
) -> TieredStore:
    """Raises InvalidArgumentError for what is no address."""
    others: list[Tier] = []
    if disk is not None:
        others.append(DiskTier(disk.directory, disk.max_bytes, policy, on_drop=on_drop))
    if remote is not None:
        others.append(RedisTier(remote.url, remote.max_bytes))
    host = HostTier(host_bytes, policy, on_drop=on_drop, move=move_in_host) if host_bytes else None
    return TieredStore(host, others, on_drop=on_drop, keeps_first=keeps_first)


def _parse_size(text: str, field: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(found[1]) * _UNITS[(found[2] or "").upper()]) if found else 0
    if num_bytes <= 0:
        raise InvalidArgumentError(field, f"must be PATH or PATH:SIZE with a size like 64G, not {text!r}")
    return num_bytes
