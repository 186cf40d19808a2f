"""Between an engine and the tiers of its prefix cache: keeps stretches of keys and values, loads those that are wanted.

Knows neither the schedule nor tensors, and never makes the engine's loop wait.  Invariant: each load is answered in the
order of its stretches, as far as they follow each other, and its last answer once; after `clear` never by what was kept
or asked for before it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from keepsight.engine.tell_tiers import tell_tiers
from keepsight.requests import TierStatus
from keepsight.scheduling.step_plan import KeptStretch
from keepsight.scheduling.stretch_loads import StretchLoad
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tiered_store import TieredStore

logger = logging.getLogger(__name__)
# Besides what computing the row would take.
LEAST_SECONDS = 0.1
# As long as no prompt was computed.
UNKNOWN_SECONDS = 1.0
# Usually it is done long before the model is loaded.
OPENING_SECONDS = 5.0
# Of all loads on their way, and taken in with one step: a step waits for them to be copied, and memory holds them.
STRETCHES_AT_ONCE = 16
LOADS_AT_ONCE = 4


class Pages(NamedTuple):
    """What all stretches of this model are alike in."""

    dtype: str
    # Layers' keys and values, blocks, numbers of a block.
    shape: tuple[int, int, int]


class LoadedStretches(NamedTuple):
    load: StretchLoad
    # Which of them, and their content.
    places: range
    arrays: tuple[StoredArray, ...]
    is_last: bool


@dataclass(slots=True, eq=False)
class _Reading:
    load: StretchLoad
    deadline: float
    # So many are to be had, as far as is known.
    num_there: int
    num_asked: int = 0
    num_taken: int = 0
    # By their place, until their turn has come.
    arrived: dict[int, StoredArray] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.num_taken == self.num_there


class PrefixTiers:
    def __init__(
        self,
        store: TieredStore,
        name: Callable[[bytes], str],
        pages: Pages,
        wake: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` makes an entry's of a stretch's hash."""
        self._store, self._name, self._pages, self._wake, self._clock = store, name, pages, wake, clock
        # By its place, with the clearings before it was asked for.
        self._answers: deque[tuple[_Reading, int, int, StoredArray | None]] = deque()
        self._readings: list[_Reading] = []
        # With the seconds that they may take from when the first is asked for.
        self._waiting: deque[tuple[StretchLoad, float]] = deque()
        self._loop_thread = 0
        self._epoch = 0

    def wait_opened(self) -> None:
        """As only what is known to be there is asked for many at a time."""
        if not self._store.wait_opened(OPENING_SECONDS):
            logger.warning("what is kept of prompts is not known yet: at first it is looked for piece by piece")

    # On the engine's loop -------------------------------------------------------------------------------------

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def load(self, load: StretchLoad, seconds: float) -> None:
        """`seconds`: what computing all of it would take; 0 where nobody knows.  Answered by `take_loaded`."""
        self._waiting.append((load, LEAST_SECONDS + (seconds or UNKNOWN_SECONDS)))

    def take_loaded(self) -> list[LoadedStretches]:
        """What has come since; more is asked for."""
        self._loop_thread = threading.get_ident()
        while self._answers:
            reading, place, epoch, array = self._answers.popleft()
            if array is None or epoch != self._epoch or not self._fits(array):
                reading.num_there = min(reading.num_there, place)
            else:
                reading.arrived[place] = array
        loaded = [self._advance(reading) for reading in self._readings]
        self._readings = [reading for reading in self._readings if not reading.is_done]
        while self._waiting and len(self._readings) < LOADS_AT_ONCE:
            load, patience = self._waiting.popleft()
            reading = _Reading(load, self._clock() + patience, len(load.hashes))
            loaded.append(self._advance(reading))
            if not reading.is_done:
                self._readings.append(reading)
        return [each for each in loaded if each.places or each.is_last]

    def _advance(self, reading: _Reading) -> LoadedStretches:
        """What of it has come and follows what was taken; more is asked for in its place."""
        first, arrays = reading.num_taken, list[StoredArray]()
        while (array := reading.arrived.pop(reading.num_taken, None)) is not None:
            arrays.append(array)
            reading.num_taken += 1
        self._ask(reading)
        if reading.is_done:
            self._note_uses(reading.load.hashes[: reading.num_taken])
        return LoadedStretches(reading.load, range(first, reading.num_taken), tuple(arrays), reading.is_done)

    def _ask(self, reading: _Reading) -> None:
        """For some more.  What is not known others may have put there: it is asked for once all before it has come."""
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
        if (array.dtype, array.shape) == self._pages:
            return True
        logger.error("a stretch of %s %s where %s %s was kept", array.dtype, array.shape, *self._pages)
        return False

    def keep(self, kept: KeptStretch, make_array: Callable[[], StoredArray]) -> None:
        name = self._name(kept.stretch)
        if self._store.find(name) is None:
            self._store.store(name, make_array())
        self._note_uses(kept.behind)

    def _note_uses(self, stretches: Sequence[bytes]) -> None:
        """Of a row, the first one last: without it none of them is found."""
        for stretch in reversed(stretches):
            self._store.note_use(self._name(stretch))

    def clear(self) -> None:
        self._epoch += 1
        self._store.clear()

    def close(self) -> None:
        self._store.close()

    # For whoever asks -----------------------------------------------------------------------------------------

    def status(self) -> tuple[TierStatus, ...]:
        return tell_tiers(self._store, "prefix")

    def check_invariants(self) -> None:
        assert all(reading.num_taken < reading.num_there for reading in self._readings)
        assert all(reading.num_taken < reading.num_asked for reading in self._readings), "nobody will wake for it"
        self._store.check_invariants()
