"""Chooses where pixels are kept, and so how they get from the frontends to the engine: once, for both sides.

Knows the configuration and the machine's resources; the two sides (`pixel_cache`, `pixel_source`) implement the modes.
"""

import logging
from typing import Literal

from keepsight.config import GIB, Config
from keepsight.ipc.run_directory import RunDirectory

logger = logging.getLogger(__name__)


# none: nowhere. processor_only: in each frontend. lru: in the engine. shm: in a ring that the only frontend writes.
# shared: in files that all processes read.
PixelMode = Literal["none", "processor_only", "lru", "shm", "shared"]


def choose_mode(
    config: Config, num_frontends: int, run_directory: RunDirectory | None, num_engines: int = 1
) -> PixelMode:
    """Choose the mode. `num_engines`: the engines that the same frontends choose among."""
    if cache_bytes(config) == 0:
        return "none"
    requested, is_one_to_one = config.mm_processor_cache_type, num_frontends == num_engines == 1
    if requested in ("lru", "shm") and not is_one_to_one:
        logger.warning(
            "processor cache: %s needs one frontend and one engine; each frontend keeps its own cache", requested
        )
        return "processor_only"
    if requested == "lru":
        return "lru"
    wanted: PixelMode = "shm" if requested == "shm" else "shared"
    if (unusable := _unusable_reason(config, run_directory)) is None:
        return wanted
    mode: PixelMode = "lru" if is_one_to_one else "processor_only"
    level = logging.INFO if requested is None else logging.WARNING
    logger.log(level, "processor cache: %s instead of %s: %s", mode, wanted, unusable)
    return mode


def cache_bytes(config: Config) -> int:
    return int(config.mm_processor_cache_gb * GIB)


def _unusable_reason(config: Config, run_directory: RunDirectory | None) -> str | None:
    """Return why pixels cannot be kept in the run directory; None if they can."""
    if run_directory is None:
        return "everything runs in one process"
    if not run_directory.is_shared_memory:
        return "there is no shared memory"
    if run_directory.num_free_bytes < cache_bytes(config):
        return f"shared memory has {run_directory.num_free_bytes} bytes free, {cache_bytes(config)} are needed"
    return None
