"""Creates an engine's tiers from the configuration, and the names of their entries.

Invariant: nothing here waits for a folder or server; one that cannot be used is soon set aside, and tried again.
"""

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from keepsight.config import GIB, Config
from keepsight.engine.embedding_tiers import EmbeddingFormat, EmbeddingTiers
from keepsight.engine.prefix_tiers import PrefixTiers, StretchFormat
from keepsight.errors import InvalidArgumentError
from keepsight.processor_config import ProcessorConfig
from keepsight.tiers.disk_place import DiskPlace, parse_disk_place
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.entry_key import entry_key, model_content_digest
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.redis_address import parse_address
from keepsight.tiers.redis_tier import RedisTier
from keepsight.tiers.tier import StoredArray, Tier
from keepsight.tiers.tiered_store import TieredStore
from keepsight.tiers.trace import TraceRecorder

logger = logging.getLogger(__name__)
MAX_REMEMBERED_NAMES = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class RemotePlace:
    url: str
    # None: as much as the server accepts.
    max_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class TierPlan:
    """Tier settings, checked before the model is loaded; the model's files are digested while it loads."""

    disk: DiskPlace | None
    remote: RemotePlace | None
    prefix_disk: DiskPlace | None
    policy: str
    trace: Path | None
    # Digest of the weights and configuration; None if no entry outlives the process.
    model_digest: Future[str] | None

    def open(
        self,
        host_bytes: int,
        format_: EmbeddingFormat,
        processor: str,
        computed_by: str,
        wake: Callable[[], object],
        move_in_host: Callable[[StoredArray], StoredArray] | None = None,
    ) -> EmbeddingTiers | None:
        """Open the tiers; None if there are none and no trace.

        `computed_by`: by what, and how, embeddings are computed: no bit of an answer may depend on which engine it was.
        """
        if not (host_bytes or self.disk or self.remote or self.trace):
            return None
        # Steps that may fail come first, because a store starts threads.
        name = self.namer(processor, computed_by)
        trace = None if self.trace is None else _open_trace(self.trace)
        dropped: deque[str] = deque()
        host = HostTier(host_bytes, self.policy, on_drop=dropped.append, move=move_in_host) if host_bytes else None
        others: list[Tier] = []
        if self.disk is not None:
            others.append(DiskTier(self.disk.directory, self.disk.max_bytes, self.policy, on_drop=dropped.append))
        if self.remote is not None:
            others.append(RedisTier(self.remote.url, self.remote.max_bytes))
        store = TieredStore(host, others, on_drop=dropped.append)
        logger.info("tiers of embeddings: %s", ", ".join(store.stats()) or "none")
        return EmbeddingTiers(store, name, format_, wake, trace=trace, dropped=dropped)

    def open_prefixes(
        self, format_: StretchFormat, processor: str, computed_by: str, wake: Callable[[], object]
    ) -> PrefixTiers | None:
        """`computed_by`: as in `open`, for keys and values."""
        if self.prefix_disk is None:
            return None
        num_blocks, numbers = format_.shape
        name = self.namer(f"stretches of {num_blocks} blocks of {numbers} numbers, pictures {processor}", computed_by)
        tier = DiskTier(self.prefix_disk.directory, self.prefix_disk.max_bytes)
        store = TieredStore(None, [tier], keeps_first=True, content="prefixes")
        return PrefixTiers(store, lambda stretch: name(stretch.hex()), format_, wake)

    def namer(self, processor: str, computed_by: str) -> Callable[[str], str]:
        """Return a function that maps encoder keys or block hashes to entry names; wait for the model's digest."""
        digest = "" if self.model_digest is None else self.model_digest.result()
        # Each name is needed several times while the engine handles its picture or prompt.
        return lru_cache(MAX_REMEMBERED_NAMES)(lambda key: entry_key(key, digest, processor, computed_by))


def plan_tiers(config: Config) -> TierPlan:
    """Plan the tiers. Raise InvalidArgumentError if a disk place or a server address is invalid."""
    disk = _plan_disk(config.encoder_disk_cache, "encoder_disk_cache", "embeddings")
    prefix_disk = _plan_disk(config.prefix_disk_cache, "prefix_disk_cache", "prefixes")
    if disk and prefix_disk and disk.directory.resolve() == prefix_disk.directory.resolve():
        raise InvalidArgumentError(
            "prefix_disk_cache", f"must not be {disk.directory}, the folder of encoder_disk_cache"
        )
    url, remote = config.encoder_remote_cache, None
    if url is not None:
        parse_address(url, "encoder_remote_cache")
        size = config.encoder_remote_cache_gb
        remote = RemotePlace(url, None if size is None else int(size * GIB))
    trace = None if config.record_cache_trace is None else Path(config.record_cache_trace)
    digest = _digest_beside(config.directory) if config.has_far_tiers else None
    return TierPlan(disk, remote, prefix_disk, config.encoder_cache_policy, trace, digest)


def _plan_disk(value: str | Path | bool | None, option: str, content: str) -> DiskPlace | None:
    if value is None or value is False:
        return None
    place = parse_disk_place(value if value is True else str(value), option, content)
    logger.info("%s on disk: in %s, up to %d bytes", content, place.directory, place.max_bytes)
    return place


def describe_processor(config: ProcessorConfig) -> str:
    """Describe what is done to pixels or samples before encoding. All earlier steps are part of an item's own name."""
    if config.sound is not None:
        return json.dumps(dataclasses.asdict(config.sound))
    return json.dumps([config.image.rescale_factor, config.image.image_mean, config.image.image_std])


def _digest_beside(directory: Path) -> Future[str]:
    """Start computing the model's digest. It takes as long as reading the weights: overlap both, and remember it."""
    threads = ThreadPoolExecutor(1, thread_name_prefix="model digest")
    digest = threads.submit(model_content_digest, directory)
    threads.shutdown(wait=False)
    return digest


def _open_trace(path: Path) -> TraceRecorder:
    try:
        return TraceRecorder(path)
    except OSError as error:
        raise InvalidArgumentError("record_cache_trace", f"{path} cannot be written: {error.strerror}") from error
