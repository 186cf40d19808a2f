"""Reports the status of an engine's tiers to the frontends whenever it has changed; the least important message.

Runs on its own thread, as tiers change while the engine loop sleeps. Invariant: every listener learns of a change at
most `SECONDS` later.
"""

import threading
from collections.abc import Callable, Sequence

from keepsight.requests import FromEngine, TiersChanged, TierStatus

SECONDS = 0.5


class TierReporter:
    def __init__(
        self, status: Callable[[], tuple[TierStatus, ...]], send: Callable[[Sequence[FromEngine]], object]
    ) -> None:
        self._status, self._send = status, send
        self._reported: tuple[TierStatus, ...] | None = None
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tier reports", daemon=True)
        self._thread.start()

    def report_again(self) -> None:
        """Report the status again, for a new listener."""
        self._reported = None

    def close(self) -> None:
        self._is_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_ended.wait(SECONDS):
            status = self._status()
            if status != self._reported:
                self._reported = status
                self._send([TiersChanged(status)])
