"""A reset that all connected engines are to confirm: nothing from before it is then found by them, or by later engines.

Asked and awaited on any thread, answered from others. Invariant: it succeeds only if every engine that was asked has
confirmed it, and waits no longer than `RESET_SECONDS`.
"""

import os
import threading
from collections.abc import Collection

from keepsight.errors import EngineLostError, ServerOverloadedError
from keepsight.frontend.caller import ConnectedEngine
from keepsight.requests import CachesReset, MediaFound, ResetCaches

# Engines reset their memory between two steps, and then their tiers: a full disk takes a second or so.
RESET_SECONDS = 30.0


class ResetQuery:
    def __init__(self, ranks: Collection[int], *, prefix: bool, encoder: bool, processor: bool) -> None:
        """`ranks`: of the engines that are known to live; there must be one, and all must be asked."""
        self.query_id = os.urandom(16).hex()
        self._message = ResetCaches(self.query_id, prefix, encoder, processor)
        self._is_over = threading.Event()
        # Ranks of the engines that may still confirm it.
        self._awaited = set(ranks)
        self._is_lost = False

    def ask(self, engines: Collection[ConnectedEngine]) -> None:
        # All before the first is asked: it may answer at once.
        self._awaited.update(engine.rank for engine in engines)
        reached = {engine.rank for engine in engines if engine.send(self._message)}
        for rank in self._awaited - reached:
            self.lose(rank)

    def take(self, answer: MediaFound | CachesReset, rank: int) -> None:
        if isinstance(answer, CachesReset):
            self._awaited.discard(rank)
            self._end_if_answered()

    def lose(self, rank: int) -> None:
        """Note that an engine will not answer (any more)."""
        if rank in self._awaited:
            self._is_lost = True
            self._awaited.discard(rank)
            self._end_if_answered()

    def give_up(self) -> None:
        for rank in tuple(self._awaited):
            self.lose(rank)

    def wait(self) -> None:
        """Wait until all have confirmed it. Raises an error if some may not have done it."""
        is_over = self._is_over.wait(RESET_SECONDS)
        if self._is_lost:
            raise EngineLostError("the reset did not reach all engines: reset again")
        if not is_over:
            raise ServerOverloadedError(f"the reset was not confirmed within {RESET_SECONDS:.0f} s: reset again")

    def _end_if_answered(self) -> None:
        if not self._awaited:
            self._is_over.set()
