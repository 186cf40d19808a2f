"""Connects an engine to the tiers of its prefix cache: stores stretches of keys and values, loads wanted ones.

Knows neither the schedule nor tensors, and never blocks the engine loop. Invariant: each load is answered in the order
of its stretches, up to the first missing one, and has exactly one last answer; after `clear`, never with data stored or
requested before it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from keepsight.engine.tier_statuses import tier_statuses
from keepsight.requests import TierStatus
from keepsight.scheduling.step_plan import KeptStretch
from keepsight.scheduling.stretch_loads import StretchLoad
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tiered_store import TieredStore

logger = logging.getLogger(__name__)
# Time allowed for a load, in addition to what computing its stretches would take.
LEAST_SECONDS = 0.1
# Assumed time to compute a load's stretches until a prompt has been computed.
UNKNOWN_SECONDS = 1.0
# Limit on waiting for the tiers to open, which is usually done long before the model is loaded.
OPENING_SECONDS = 5.0
# Limit on stretches of all loads in flight, and so on those taken in with one step: the step waits for their copies,
# and they occupy host memory.
STRETCHES_AT_ONCE = 16
LOADS_AT_ONCE = 4


class StretchFormat(NamedTuple):
    """Properties shared by all stretches of this model."""

    dtype: str
    # [blocks, numbers per block], of all layers.
    shape: tuple[int, int]


class LoadedStretches(NamedTuple):
    load: StretchLoad
    # Indices of the stretches within the load, and their contents.
    places: range
    arrays: tuple[StoredArray, ...]
    is_last: bool


@dataclass(slots=True, eq=False)
class _Reading:
    load: StretchLoad
    deadline: float
    # The number of leading stretches that can be loaded, as far as is known.
    num_there: int
    num_asked: int = 0
    num_taken: int = 0
    # By index in the load, until all earlier ones have been taken.
    arrived: dict[int, StoredArray] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.num_taken == self.num_there


class PrefixTiers:
    def __init__(
        self,
        store: TieredStore,
        name: Callable[[bytes], str],
        format_: StretchFormat,
        wake: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` maps a stretch's hash to an entry name."""
        self._store, self._name, self._format, self._wake, self._clock = store, name, format_, wake, clock
        # Each with the index in the load and the epoch (the number of clears so far) at which it was requested.
        self._answers: deque[tuple[_Reading, int, int, StoredArray | None]] = deque()
        self._readings: list[_Reading] = []
        # Each with the seconds it may take, counted from the request for its first stretch.
        self._waiting: deque[tuple[StretchLoad, float]] = deque()
        self._loop_thread = 0
        self._epoch = 0

    def wait_opened(self) -> None:
        """Wait until the tiers know what they hold: only known entries are requested many at a time."""
        if not self._store.wait_opened(OPENING_SECONDS):
            logger.warning("stored prefixes are not known yet: at first they are looked up piece by piece")

    # On the engine's loop -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True if `take_loaded` has something to return or to request."""
        return bool(self._answers) or self._has_next

    @property
    def _has_next(self) -> bool:
        return bool(self._waiting) and len(self._readings) < LOADS_AT_ONCE

    def load(self, load: StretchLoad, seconds: float) -> None:
        """Queue a load for `take_loaded`. `seconds`: the time that computing all of it would take; 0 if unknown."""
        self._waiting.append((load, LEAST_SECONDS + (seconds or UNKNOWN_SECONDS)))

    def take_loaded(self) -> list[LoadedStretches]:
        """Return what has arrived since the last call, and request more."""
        self._loop_thread = threading.get_ident()
        while self._answers:
            reading, place, epoch, array = self._answers.popleft()
            if array is None or epoch != self._epoch or not self._fits(array):
                reading.num_there = min(reading.num_there, place)
            else:
                reading.arrived[place] = array
        loaded = [self._advance(reading) for reading in self._readings]
        self._readings = [reading for reading in self._readings if not reading.is_done]
        while self._has_next:
            load, patience = self._waiting.popleft()
            reading = _Reading(load, self._clock() + patience, len(load.hashes))
            loaded.append(self._advance(reading))
            if not reading.is_done:
                self._readings.append(reading)
        return [each for each in loaded if each.places or each.is_last]

    def _advance(self, reading: _Reading) -> LoadedStretches:
        """Take the stretches that have arrived and come next in order; request as many more."""
        first, arrays = reading.num_taken, list[StoredArray]()
        while (array := reading.arrived.pop(reading.num_taken, None)) is not None:
            arrays.append(array)
            reading.num_taken += 1
        self._ask(reading)
        if reading.is_done:
            self._note_uses(reading.load.hashes[: reading.num_taken])
        return LoadedStretches(reading.load, range(first, reading.num_taken), tuple(arrays), reading.is_done)

    def _ask(self, reading: _Reading) -> None:
        """Request some more stretches.

        Other processes may have stored those that are not known: request these once all before them have arrived.
        """
        now = self._clock()
        most = reading.num_taken + max(1, STRETCHES_AT_ONCE // max(1, len(self._readings)))
        for place in range(reading.num_asked, min(reading.num_there, most)):
            if now > reading.deadline:
                reading.num_there = reading.num_asked
                return
            name = self._name(reading.load.hashes[place])
            if place > reading.num_taken and self._store.find(name) is None:
                return
            reading.num_asked = place + 1
            self._store.load(name, reading.deadline - now, partial(self._take_answer, reading, place, self._epoch))

    def _take_answer(
        self, reading: _Reading, place: int, epoch: int, array: StoredArray | None, _tier: str | None
    ) -> None:
        self._answers.append((reading, place, epoch, array))
        if threading.get_ident() != self._loop_thread:
            self._wake()

    def _fits(self, array: StoredArray) -> bool:
        if (array.dtype, array.shape) == self._format:
            return True
        logger.error(
            "a tier returned a stretch of %s %s instead of %s %s: ignored", array.dtype, array.shape, *self._format
        )
        return False

    def keep(self, kept: KeptStretch, make_array: Callable[[], StoredArray]) -> None:
        name = self._name(kept.stretch)
        if self._store.find(name) is None:
            self._store.store(name, make_array())
        self._note_uses(kept.behind)

    def _note_uses(self, stretches: Sequence[bytes]) -> None:
        """Note a use of consecutive stretches, the first one last: without it none of the others is found."""
        for stretch in reversed(stretches):
            self._store.note_use(self._name(stretch))

    @property
    def can_be_asked(self) -> bool:
        """False while the tiers are set aside."""
        return not self._store.list_unasked()

    @property
    def is_cleared(self) -> bool:
        return self._store.is_cleared

    def clear(self) -> None:
        """Clear all tiers soon. The loop is woken whenever one is cleared."""
        self._epoch += 1
        self._store.clear(self._wake)

    def close(self) -> None:
        self._store.close()

    # Status ---------------------------------------------------------------------------------------------------

    def status(self) -> tuple[TierStatus, ...]:
        return tier_statuses(self._store, "prefix")

    def check_invariants(self) -> None:
        assert all(reading.num_taken < reading.num_there for reading in self._readings)
        assert all(reading.num_taken < reading.num_asked for reading in self._readings), "nobody will wake for it"
        self._store.check_invariants()
