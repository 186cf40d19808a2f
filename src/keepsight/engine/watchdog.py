"""Ends the engine's process when a step never ends, as when a driver hangs: its requests would wait for ever.

To the rest of the server that is an engine that died. Watches from a thread of its own, so what hangs must have
released the interpreter's lock, as torch and our kernels do. Work beside the steps is not watched.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from traceback import walk_stack

logger = logging.getLogger(__name__)

# Used on a GPU. On a CPU the step of a large model may take as long.
DEFAULT_SECONDS = 300.0
# How often the beat is read within the time limit. A process that was itself stopped, as with its container, has
# missed one look, however long that was.
NUM_LOOKS = 10


class Watchdog:
    def __init__(self, beat: Callable[[], int | None], seconds: float, end: Callable[[], None]) -> None:
        """Call `end` once the same `beat` was read for `seconds`. None: nothing is to be watched at the moment."""
        self._beat, self._seconds, self._end = beat, seconds, end
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self) -> None:
        last, num_equal = self._beat(), 0
        while not self._is_closed.wait(min(self._seconds / NUM_LOOKS, threading.TIMEOUT_MAX)):
            beat = self._beat()
            num_equal = num_equal + 1 if beat is not None and beat == last else 0
            last = beat
            if num_equal == NUM_LOOKS:
                problem = f"a step has not ended for {self._seconds:g} s. Where this engine's threads are:"
                logger.critical("%s%s", problem, describe_threads())
                # Unless it ended meanwhile: what a library wrote may have waited for the log's reader, who is back.
                if self._beat() == last:
                    self._end()
                    return


def describe_threads() -> str:
    """The calls of each thread, the innermost first.

    For the log, which never waits long. faulthandler would write to standard error itself, and hold the interpreter's
    lock while nobody reads that: then no thread could end this process.
    """
    lines = []
    for identifier, innermost in sys._current_frames().items():
        lines.append(f"\nThread {identifier:#x}:")
        for frame, number in walk_stack(innermost):
            lines.append(f'  File "{frame.f_code.co_filename}", line {number} in {frame.f_code.co_name}')
    return "\n".join(lines)


def end_process() -> None:
    logger.critical("this engine gives up")
    os._exit(1)
