"""The engine on a thread of its own in the caller's process, and the client that asks it."""

import threading

from keepsight.engine.embedding_tiers import EmbeddingTiers
from keepsight.engine.engine_loop import EngineLoop, Runner
from keepsight.engine.engine_meter import EngineMeter
from keepsight.engine.inbox import Inbox
from keepsight.engine.pixel_source import PixelSource
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.media_pool import MediaPool
from keepsight.ipc.run_directory import RunDirectory
from keepsight.observe.counters import Counters
from keepsight.observe.request_observer import RequestObserver
from keepsight.observe.totals import Totals
from keepsight.scheduling.scheduler import Scheduler


class InProcessEngine(EngineClient):
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        inbox: Inbox,
        media_pool: MediaPool,
        source: PixelSource | None = None,
        run_directory: RunDirectory | None = None,
        tiers: EmbeddingTiers | None = None,
        *,
        takes_unasked: bool = True,
        counters: Counters | None = None,
        bytes_per_block: int = 0,
    ) -> None:
        """`inbox` is the one that the runner wakes; what the two sides of the pixel cache share ends with this."""
        # The frontend's, which the pool has too, and the engine's: each is changed by its own threads.
        self._counters = (counters or Counters(), Counters())
        super().__init__(media_pool, RequestObserver(self._counters[0]))
        self._inbox, self._run_directory = inbox, run_directory
        source = source or PixelSource()
        self._meter = EngineMeter(self._counters[1], scheduler, bytes_per_block, source, tiers)
        self._loop = EngineLoop(scheduler, runner, inbox, self.receive, source, tiers, self._meter)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.connect(inbox.try_put, takes_unasked=takes_unasked)
        self._thread.start()

    def read_totals(self) -> Totals:
        self._meter.measure_tiers()
        pages = (("llm", each.numbers()) for each in self._counters)
        return Totals.of_pages(pages).set_gauges(self._media_pool.common_sizes())

    def close(self) -> None:
        self._inbox.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        super().close()
        if self._run_directory is not None:
            self._run_directory.close()

    def _run(self) -> None:
        self._loop.run()
        assert self._loop.reason_of_end is not None
        self.give_up(self._loop.reason_of_end)
