"""The engine on its own thread in the caller's process, and the client that talks to it."""

import threading
from pathlib import Path

from keepsight.engine.engine_loop import EngineLoop
from keepsight.engine.loaded_engine import LoadedEngine
from keepsight.engine.pixel_source import PixelSource
from keepsight.errors import InvalidArgumentError
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.media_pool import MediaPool
from keepsight.ipc.run_directory import RunDirectory
from keepsight.observe.counters import Counters
from keepsight.observe.request_observer import RequestObserver
from keepsight.observe.totals import Totals
from keepsight.requests import Adapter
from keepsight.runner.keep_freed_memory import give_back_memory


class InProcessEngine(EngineClient):
    def __init__(
        self,
        engine: LoadedEngine,
        media_pool: MediaPool,
        source: PixelSource,
        run_directory: RunDirectory | None,
        counters: Counters,
    ) -> None:
        """Call `start` to run it. `close` also removes `run_directory`, which both sides of the pixel cache share."""
        # The frontend's counters, shared with the media pool, and the engine's: each is changed by its own threads.
        self._counters = (counters, Counters())
        super().__init__(media_pool, RequestObserver(counters))
        self._inbox, self._run_directory = engine.inbox, run_directory
        # None once closed.
        self._adapters = engine.adapters
        self._meter = engine.make_meter(self._counters[1], source)
        # None once it has ended.
        self._loop: EngineLoop | None = engine.make_loop(self.receive, source, self._meter)
        self._running = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.connect(engine.inbox.try_put, accepts_unrequested_pixels=engine.accepts_unrequested_pixels)

    def start(self) -> None:
        """Start the engine's thread. The caller must call `close`, too, even if this was interrupted."""
        self._thread.start()

    def read_totals(self) -> Totals:
        self._meter.measure_tiers()
        pages = (("llm", each.numbers()) for each in self._counters)
        return Totals.of_pages(pages).set_gauges(self._media_pool.common_sizes())

    def load_adapter(self, name: str, path: Path) -> Adapter:
        """Load an adapter, which later requests can name."""
        if self._adapters is None:
            raise InvalidArgumentError("lora_request", "needs enable_lora=True")
        return self._adapters.load(name, path)

    def close(self) -> None:
        """Close the engine. If an earlier call was interrupted, this one does the rest."""
        self._inbox.close()
        if threading.current_thread() is not self._thread:
            # Waits for the loop: after an interrupted `join`, another one takes a running thread for an ended one.
            self._run()
            if self._thread.is_alive():
                self._thread.join()
        super().close()
        self._adapters = None
        if self._run_directory is not None:
            self._run_directory.close()
        give_back_memory()

    def _run(self) -> None:
        """Run the loop once: on its thread, or in `close` if that comes first. Other calls return when it has ended."""
        with self._running:
            if self._loop is None:
                return
            try:
                self._loop.run()
                assert self._loop.reason_of_end is not None
                self.give_up(self._loop.reason_of_end)
            finally:
                # The loop holds the model and forms a cycle with this: both would live until the next cyclic GC.
                self._loop = None
