"""Ends the engine's process when a step never ends, as when a driver hangs: its requests would wait for ever.

To the rest of the server that is an engine that died. Watches from a thread of its own, so what hangs must have
released the interpreter's lock, as torch and our kernels do.
"""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

# How often the beat is read within the time limit. Counting looks instead of seconds spares a process that was itself
# stopped for long, as with its container.
NUM_LOOKS = 10


class Watchdog:
    def __init__(self, beat: Callable[[], int | None], seconds: float, bark: Callable[[float], None]) -> None:
        """Call `bark` once the same `beat` was read for `seconds`. None: nothing is to be watched at the moment."""
        self._beat, self._seconds, self._bark = beat, seconds, bark
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self) -> None:
        last, num_equal = self._beat(), 0
        while not self._is_closed.wait(self._seconds / NUM_LOOKS):
            beat = self._beat()
            num_equal = num_equal + 1 if beat is not None and beat == last else 0
            last = beat
            if num_equal == NUM_LOOKS:
                self._bark(self._seconds)
                return


def end_process(seconds: float) -> None:
    logger.critical("a step has not ended for %g s: this engine gives up. Where its threads are:", seconds)
    faulthandler.dump_traceback()
    os._exit(1)
