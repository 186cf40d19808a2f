"""The engine as a separate process: the model, its loop in the main thread, and the frontends connected by a socket.

However the loop ends, the frontends learn it from the end of their connections, and give requests that have not begun
to the next engine.
"""

import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import sleep

from keepsight.checkpoint_folder import check_is_unchanged
from keepsight.config import Config
from keepsight.engine.load_engine import load_engine_alone
from keepsight.engine.loaded_engine import LoadedEngine
from keepsight.engine.machine_part import MachinePart
from keepsight.engine.pixel_source import open_pixel_source
from keepsight.engine.report_tiers import TierReporter
from keepsight.engine.route_outputs import OutputRouter
from keepsight.engine.watchdog import DEFAULT_SECONDS, Watchdog, end_process
from keepsight.ipc.channel import EngineListener
from keepsight.ipc.control import (
    FAILED_AT_WORK,
    Drain,
    FrontendLost,
    ProcessEnd,
    Ready,
    StartEngine,
    ToProcess,
    run_process,
)
from keepsight.ipc.handshake import Welcome
from keepsight.observe.counters import Counters
from keepsight.program_identity import check_program_is
from keepsight.requests import EngineRequest, FromEngine, Received, RequestBegun, RequestFailed

logger = logging.getLogger(__name__)
# Long enough for a socket's thread and a frontend to pass a token on. While a step computes on all cores, they would
# wait for the operating system's next tick, some milliseconds: as long as a small model takes for a token.
HAND_OVER_SECONDS = 0.001


class EngineProcess:
    def __init__(self, start: StartEngine, config: Config, engine: LoadedEngine) -> None:
        mode = start.pixel_mode if engine.takes_media else "none"
        self._inbox, self._router = engine.inbox, OutputRouter(engine.inbox)
        self._computes_on_cores = engine.computes_on_cores
        welcome = Welcome(engine.max_model_len, accepts_unrequested_pixels=engine.accepts_unrequested_pixels)
        run_directory = Path(start.run_directory)
        source = open_pixel_source(mode, config, run_directory)
        counters = Counters.open(run_directory, f"engine-{start.rank}")
        meter = engine.make_meter(counters, source)
        self._loop = engine.make_loop(self._send, source, meter)
        # Set below: it sends through the listener, whose `on_welcomed` callback uses it.
        self._reporter: TierReporter | None = None
        self._listener = EngineListener(
            start.endpoint, welcome, self._take, self._router.lose, on_welcomed=self._report_to_new_listener
        )
        if engine.tiers is not None or engine.prefixes is not None:
            self._reporter = TierReporter(meter.measure_tiers, self._send)
        self._is_asked_to_end = False
        # How long a step may take, or this process stand still as a whole; 0: any time.
        self.max_still_seconds = 0.0 if engine.computes_on_cores else DEFAULT_SECONDS
        if start.watchdog_seconds is not None:
            self.max_still_seconds = start.watchdog_seconds

    def run(self) -> int:
        """Run the loop until it ends. Return the exit status."""
        seconds = self.max_still_seconds
        watchdog = Watchdog(lambda: self._loop.beat, seconds, end_process) if seconds else None
        self._loop.run()
        if watchdog is not None:
            watchdog.close()
        if self._reporter is not None:
            self._reporter.close()
        self._listener.close()
        if self._is_asked_to_end:
            return 0
        return FAILED_AT_WORK if self._loop.has_failed_at_work else 1

    def act_on(self, message: ToProcess) -> None:
        match message:
            case FrontendLost(frontend_id):
                # The end of its connection will say the same, after the last message it had sent.
                self._router.lose(frontend_id)
            case Drain():
                self._is_asked_to_end = True
                self._inbox.close()
            case _:
                raise AssertionError(message)

    def _report_to_new_listener(self) -> None:
        self._loop.report_all_held()
        if self._reporter is not None:
            self._reporter.report_again()

    def _take(self, frontend_id: str, message: Received) -> None:
        refusal = self._router.take(frontend_id, message)
        # While a failed loop is closing, send no refusal: the end of the connection says to ask the next engine.
        has_failed = self._inbox.is_closed and not self._is_asked_to_end
        if refusal is not None and not has_failed and isinstance(message, EngineRequest):
            self._listener.send(frontend_id, [RequestFailed(message.request_id, refusal)])

    def _send(self, outputs: Sequence[FromEngine]) -> None:
        # When the loop ends, it fails all running requests. Do not pass that on: the next engine may do better.
        if not self._inbox.is_closed:
            self._router.send(outputs, self._listener)
            # A client is waiting for a first token.
            if self._computes_on_cores and any(isinstance(each, RequestBegun) for each in outputs):
                sleep(HAND_OVER_SECONDS)


def main(control: ProcessEnd) -> int:
    # Read when transformers is imported: a server never downloads remote files that a checkpoint names.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    start = control.receive()
    assert isinstance(start, StartEngine)
    check_program_is(start.program)
    config, part = Config.from_options(**start.options), MachinePart(start.rank, start.num_engines)
    check_is_unchanged(config.directory, start.files, *config.adapter_folders.values())
    engine = load_engine_alone(config, part)
    # Again, as they may have changed while being read: requests name an adapter by what frontends found in its folder.
    check_is_unchanged(config.directory, start.files, *config.adapter_folders.values())
    process = EngineProcess(start, config, engine)
    # Everything loaded so far stays: scanning it for garbage would stop every stream for some 60 ms.
    gc.freeze()
    control.listen(process.act_on)
    # Not before: what loads a model may hold the interpreter's lock for any time.
    control.give_signs_of_life(process.max_still_seconds)
    control.send(Ready())
    return process.run()


if __name__ == "__main__":
    sys.exit(run_process(main))
