"""All parts of an engine except its loop, which runs in a process of its own or in the caller's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepsight.engine.embedding_tiers import EmbeddingTiers
from keepsight.engine.engine_loop import EngineLoop, Runner
from keepsight.engine.engine_meter import EngineMeter
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import PixelSource
from keepsight.engine.prefix_tiers import PrefixTiers
from keepsight.observe.counters import Counters
from keepsight.requests import FromEngine
from keepsight.runner.held_adapters import HeldAdapters
from keepsight.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    scheduler: Scheduler
    runner: Runner
    # The inbox that the runner wakes.
    inbox: Inbox
    # See `Welcome`.
    accepts_unrequested_pixels: bool
    # Size of the keys and values of one block.
    bytes_per_block: int
    # True if a step keeps the same cores busy that the frontends run on.
    computes_on_cores: bool
    tiers: EmbeddingTiers | None = None
    prefixes: PrefixTiers | None = None
    # None if requests may not name adapters.
    adapters: HeldAdapters | None = None

    @property
    def max_model_len(self) -> int:
        """The most positions of a request: no more than there is memory for."""
        return self.scheduler.config.max_model_len

    @property
    def takes_media(self) -> bool:
        return self.scheduler.config.tokens_per_item > 0

    def make_meter(self, counters: Counters, source: PixelSource) -> EngineMeter:
        return EngineMeter(counters, self.scheduler, self.bytes_per_block, source, self.tiers, self.prefixes)

    def make_loop(
        self, send: Callable[[Sequence[FromEngine]], None], source: PixelSource, meter: EngineMeter
    ) -> EngineLoop:
        return EngineLoop(self.scheduler, self.runner, self.inbox, send, source, self.tiers, meter, self.prefixes)

    def close(self) -> None:
        """Close an engine that was not given to a loop; a loop closes its engine itself."""
        self.runner.close()
        for tiers in (self.tiers, self.prefixes):
            if tiers is not None:
                tiers.close()
