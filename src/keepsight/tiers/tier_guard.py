"""Decides whether a tier may be used: one that fails or is slow is set aside for a while, then tried again.

Knows only how long a tier's operations took and whether they worked. Table of its states:
  in use     a failure, or too many slow ones    -> set aside, twice as long each time
  set aside  its time is over                    -> on trial
  on trial   one operation: works / fails        -> in use / set aside
Invariant: while a tier is set aside nothing is begun, and on trial one operation at a time.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keepsight.errors import TierError

logger = logging.getLogger(__name__)

_NUM_WATCHED = 64
_NUM_ENOUGH = 20
# After so many successful operations in a row, the failures before them are forgotten.
_NUM_FORGIVEN = 100


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Limits on an operation: its 95th percentile, and when it counts as never returning; limits on the pauses."""

    slow_seconds: float = 0.5
    stuck_seconds: float = 10.0
    first_pause: float = 0.25
    longest_pause: float = 60.0


DEFAULT_LIMITS = GuardLimits()


class TierGuard:
    def __init__(self, title: str, limits: GuardLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """`title`: what the log calls the tier."""
        self.title, self._limits, self._clock = title, limits, clock
        self._lock = threading.Lock()
        self._durations: deque[float] = deque(maxlen=_NUM_WATCHED)
        # When each operation in progress began, by its token.
        self._under_way: dict[int, float] = {}
        self._num_begun = self._num_well = 0
        self._pause = 0.0
        self._set_aside_until: float | None = None
        # The token of the trial operation in progress, if any.
        self._trial: int | None = None
        # Why it was last set aside.
        self._reason: str | None = None

    @property
    def is_usable(self) -> bool:
        with self._lock:
            return self._may_begin()

    @contextmanager
    def watch(self, *, may_try: bool = True) -> Iterator[bool]:
        """Yield whether the operation may begin. An OSError or TierError that it raises is caught and noted here.

        `may_try`: False if its success would not show that a tier that was set aside works again.
        """
        token = self._try_begin(may_try)
        if token is None:
            yield False
            return
        failure: Exception | None = None
        try:
            yield True
        except (OSError, TierError) as error:
            failure = error
        except BaseException as error:
            self._end(token, TierError(repr(error)))
            raise
        self._end(token, failure)

    def why_unused(self) -> str | None:
        with self._lock:
            if self._is_stuck():
                return "an operation does not return"
            return None if self._set_aside_until is None else self._reason

    def _may_begin(self) -> bool:
        if self._set_aside_until is None:
            return not self._is_stuck()
        return self._clock() >= self._set_aside_until and self._trial is None

    def _is_stuck(self) -> bool:
        oldest = min(self._under_way.values(), default=None)
        return oldest is not None and self._clock() - oldest > self._limits.stuck_seconds

    def _try_begin(self, may_try: bool) -> int | None:
        with self._lock:
            if not self._may_begin() or (self._set_aside_until is not None and not may_try):
                return None
            self._num_begun += 1
            self._under_way[self._num_begun] = self._clock()
            if self._set_aside_until is not None:
                self._trial = self._num_begun
            return self._num_begun

    def _end(self, token: int, failure: Exception | None) -> None:
        with self._lock:
            duration = self._clock() - self._under_way.pop(token)
            if self._set_aside_until is not None and token != self._trial:
                return  # begun before the tier was set aside: says nothing about its present state
            self._durations.append(duration)
            if failure is not None:
                self._set_aside(f"{type(failure).__name__}: {failure}")
            elif self._is_slow():
                self._set_aside(f"slow: one of 20 operations takes more than {self._limits.slow_seconds:g} s")
            else:
                self._note_well()

    def _note_well(self) -> None:
        if self._trial is not None:
            logger.warning("the %s is used again", self.title)
        self._trial = None
        self._set_aside_until = None
        self._num_well += 1
        if self._num_well >= _NUM_FORGIVEN:
            self._pause = 0.0

    def _is_slow(self) -> bool:
        if self._trial is not None:
            return self._durations[-1] > self._limits.slow_seconds
        slowest = sorted(self._durations)
        return len(slowest) >= _NUM_ENOUGH and slowest[int(0.95 * (len(slowest) - 1))] > self._limits.slow_seconds

    def _set_aside(self, reason: str) -> None:
        pause = min(self._limits.longest_pause, max(self._limits.first_pause, 2 * self._pause))
        # A tier that stays unusable is logged while its pauses grow, not at each trial until it is repaired.
        if self._trial is None or pause != self._pause:
            logger.warning("the %s is set aside for %.3g s: %s", self.title, pause, reason)
        self._pause = pause
        self._set_aside_until = self._clock() + pause
        self._trial = None
        self._reason = reason
        self._num_well = 0
        self._durations.clear()

    def check_invariants(self) -> None:
        with self._lock:
            assert self._trial is None or (self._set_aside_until is not None and self._trial in self._under_way)
            assert 0 <= self._pause <= self._limits.longest_pause
