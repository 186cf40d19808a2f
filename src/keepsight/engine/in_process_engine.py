"""The engine on a thread of its own in the caller's process, and the client that asks it."""

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
        """To be started.  What the two sides of the pixel cache share in `run_directory` ends with this."""
        # The frontend's, which the pool has too, and the engine's: each is changed by its own threads.
        self._counters = (counters, Counters())
        super().__init__(media_pool, RequestObserver(counters))
        self._inbox, self._run_directory = engine.inbox, run_directory
        # Until it is closed.
        self._adapters = engine.adapters
        self._meter = engine.make_meter(self._counters[1], source)
        # Until it has ended.
        self._loop: EngineLoop | None = engine.make_loop(self.receive, source, self._meter)
        self._running = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.connect(engine.inbox.try_put, takes_unasked=engine.takes_unasked)

    def start(self) -> None:
        """Whoever calls this closes it, too, even where this was interrupted."""
        self._thread.start()

    def read_totals(self) -> Totals:
        self._meter.measure_tiers()
        pages = (("llm", each.numbers()) for each in self._counters)
        return Totals.of_pages(pages).set_gauges(self._media_pool.common_sizes())

    def load_adapter(self, name: str, path: Path) -> Adapter:
        """For requests that name it from now on."""
        if self._adapters is None:
            raise InvalidArgumentError("lora_request", "needs enable_lora=True")
        return self._adapters.load(name, path)

    def close(self) -> None:
        """An earlier call may have been interrupted: this does the rest."""
        self._inbox.close()
        if threading.current_thread() is not self._thread:
            # Waits: `join` alone, once interrupted, takes a thread that still runs for one that has ended.
            self._run()
            if self._thread.is_alive():
                self._thread.join()
        super().close()
        self._adapters = None
        if self._run_directory is not None:
            self._run_directory.close()
        give_back_memory()

    def _run(self) -> None:
        """Once: on its thread, or where it is closed before that began.  Any other call returns when it has ended."""
        with self._running:
            if self._loop is None:
                return
            try:
                self._loop.run()
                assert self._loop.reason_of_end is not None
                self.give_up(self._loop.reason_of_end)
            finally:
                # It holds the model, and each of the two the other: they would stay until garbage is looked for.
                self._loop = None
