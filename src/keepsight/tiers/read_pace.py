"""Tells whether a read would take longer than its caller waits, from how long the tier's last reads took.

Knows nothing of failures: a tier may be too slow for entries that are quickly recomputed, and serve those that cannot
be.
"""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Several, so that a single slow read keeps nobody from a fast tier.
_NUM_WATCHED = 4
# Time between reads that nobody waits for, to see whether the tier has become faster.
TRIAL_SECONDS = 5.0


class ReadPace:
    """One thread notes reads, others ask; `is_trial_due` is asked by one at a time."""

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`title`: what the log calls the tier."""
        self._title, self._clock = title, clock
        self._last: tuple[float, ...] = ()
        self._next_trial = 0.0
        self._is_logged = False

    def note(self, seconds: float) -> None:
        """Note how long a read took that did not fail."""
        self._last = (*self._last, seconds)[-_NUM_WATCHED:]

    def is_enough(self, patience: float) -> bool:
        """Return False if even the fastest of the last reads took longer."""
        last = self._last
        return len(last) < _NUM_WATCHED or min(last) <= patience

    def is_trial_due(self) -> bool:
        """Return True if a read that is not worth waiting for should be made all the same, which counts as made."""
        if not self._is_logged:
            self._is_logged = True
            least = min(self._last)
            logger.warning("the %s takes %.3g s: it is not asked for what is recomputed faster", self._title, least)
        if self._clock() < self._next_trial:
            return False
        self._next_trial = self._clock() + TRIAL_SECONDS
        return True
