"""Chooses where pixels are kept and in how much memory, and so how they get to the engine: once, for both sides.

Knows the configuration and the machine's resources; the two sides (`pixel_cache`, `pixel_source`) implement the modes.
"""

import dataclasses
import logging
from typing import Literal

from keepsight.config import GIB, Config
from keepsight.host_memory import measure_host_memory
from keepsight.ipc.run_directory import RunDirectory

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 4 * GIB

# none: nowhere. processor_only: in each frontend. lru: in the engine. shm: in a ring that the only frontend writes.
# shared: in files that all processes read.
PixelMode = Literal["none", "processor_only", "lru", "shm", "shared"]


def choose_size_and_mode(
    config: Config, num_frontends: int, run_directory: RunDirectory | None, num_engines: int = 1
) -> tuple[Config, PixelMode]:
    """Return the configuration with the cache's size, chosen here unless the user set it, and the mode."""
    if config.mm_processor_cache_gb is not None:
        return config, choose_mode(config, num_frontends, run_directory, num_engines)
    num_bytes, reason = _derive_bytes()
    config = _with_bytes(config, num_bytes)
    mode = choose_mode(config, num_frontends, run_directory, num_engines)
    if mode == "processor_only" and num_frontends > 1:
        num_bytes, reason = num_bytes // num_frontends, f"{reason}, divided among {num_frontends} frontends"
        config = _with_bytes(config, num_bytes)
    logger.info("mm_processor_cache_bytes is %d: %s", num_bytes, reason)
    return config, mode


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
    """For a configuration in which the size is set, by the user or by `choose_size_and_mode`."""
    assert config.mm_processor_cache_gb is not None, "not chosen yet"
    return int(config.mm_processor_cache_gb * GIB)


def _derive_bytes() -> tuple[int, str]:
    """Return the default size, or a part of the available memory if that is less, and the reason.

    Pixels fill it as they come. In shared memory, too, they count against the limit of a container, where the engine
    must have room beside them: the kernel would kill it and each of its successors.
    """
    _, available = measure_host_memory()
    part = available // 4
    if part >= DEFAULT_BYTES:
        return DEFAULT_BYTES, "the default"
    return part, f"a quarter of the {available / GIB:.1f} GiB that are available"


def _with_bytes(config: Config, num_bytes: int) -> Config:
    return dataclasses.replace(config, mm_processor_cache_gb=num_bytes / GIB)


def _unusable_reason(config: Config, run_directory: RunDirectory | None) -> str | None:
    """Return why pixels cannot be kept in the run directory; None if they can."""
    if run_directory is None:
        return "everything runs in one process"
    if not run_directory.is_shared_memory:
        return "there is no shared memory"
    if run_directory.num_free_bytes < cache_bytes(config):
        return f"shared memory has {run_directory.num_free_bytes} bytes free, {cache_bytes(config)} are needed"
    return None
