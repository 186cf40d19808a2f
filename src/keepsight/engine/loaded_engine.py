"""All of an engine but its loop, which runs in a process of its own or in the caller's."""

from dataclasses import dataclass

from keepsight.engine.embedding_tiers import EmbeddingTiers
from keepsight.engine.engine_loop import Runner
from keepsight.engine.inbox import Inbox
from keepsight.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    scheduler: Scheduler
    runner: Runner
    # The one that the runner wakes.
    inbox: Inbox
    # What there is room for.
    max_model_len: int
    takes_media: bool
    # As `Welcome` has it.
    takes_unasked: bool
    # Keys and values of one block.
    bytes_per_block: int
    # Whether a step keeps the very cores busy that frontends run on.
    computes_on_cores: bool
    tiers: EmbeddingTiers | None = None

    def close(self) -> None:
        """For whoever gives it to no loop, which would."""
        self.runner.close()
        if self.tiers is not None:
            self.tiers.close()
