"""Connects an engine to its embedding tiers: stores new embeddings, loads wanted ones, reports which media are held.

Knows neither the schedule nor tensors, and never blocks the engine loop. Invariant: each load is answered exactly once;
after `clear`, never with data stored or requested before it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from keepsight.engine.tier_statuses import tier_statuses
from keepsight.observe.mean_cost import MeanCost
from keepsight.requests import EngineRequest, TierStatus
from keepsight.scheduling.embedding_loads import Load
from keepsight.scheduling.encoder_cache_manager import encoder_key
from keepsight.scheduling.step_plan import Encoding
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tiered_store import TieredStore
from keepsight.tiers.trace import Access, TraceRecorder

logger = logging.getLogger(__name__)
# Time until a picture that is not held could be encoded: it is requested, decoded, resized and sent, on a busy machine.
PIXEL_SECONDS = 0.2
# Assumed encoding time until something has been encoded.
UNKNOWN_ENCODING_SECONDS = 1.0
# Limit on uses that wait for the first encoding to show what one costs.
MAX_UNRECORDED_USES = 10_000


class EmbeddingFormat(NamedTuple):
    """Properties shared by all entries of this model."""

    dtype: str
    width: int
    num_bytes: int


class Loaded(NamedTuple):
    """The array found and the tier that had it; both None if no tier has it or it would come too late."""

    encoder_key: str
    array: StoredArray | None
    tier: str | None


class EmbeddingTiers:
    def __init__(
        self,
        store: TieredStore,
        name: Callable[[str], str],
        format_: EmbeddingFormat,
        wake: Callable[[], object],
        *,
        trace: TraceRecorder | None = None,
        dropped: deque[str] | None = None,
    ) -> None:
        """`name` maps an encoder key to an entry name; the store appends the names it drops to `dropped`."""
        self._store, self._name, self._format, self._wake, self._trace = store, name, format_, wake, trace
        # Of `_media` and `_held`: the loop waits for it often.
        self._lock = threading.Lock()
        # Held while storing, which frees evicted entries, and while clearing: nothing is stored for an earlier epoch.
        self._storing = threading.Lock()
        # Each with the epoch (the number of clears so far) at which it was requested.
        self._answers: deque[tuple[Load, int, StoredArray | None, str | None]] = deque()
        self._loop_thread = 0
        self._epoch = 0
        # Nearest first.
        self.names = tuple(store.stats())
        # Entry names that may have been stored or dropped; media hashes by entry name; entry names reported as held.
        self._changed: deque[str] = deque() if dropped is None else dropped
        self._media: dict[str, str] = {}
        self._held: set[str] = set()
        self._num_loading = 0
        self._encoding_cost = MeanCost()
        # Their keys are encoder keys until they are recorded.
        self._unrecorded_uses: deque[Access] = deque(maxlen=MAX_UNRECORDED_USES)

    @property
    def has_work(self) -> bool:
        """True if `take_loaded` has something to return."""
        return bool(self._answers)

    # On the engine's loop -------------------------------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Request a load for `take_loaded`: ready at once if in host memory or in no tier, else the loop is woken."""
        self._num_loading += 1
        self._loop_thread = threading.get_ident()
        on_loaded = partial(self._take_answer, load, self._epoch)
        self._store.load(self._name(load.encoder_key), self._patience(load), on_loaded)

    def _patience(self, load: Load) -> float:
        """Return the seconds that recomputing would take: all pending loads would be encoded one after the other.

        If it cannot be recomputed, return how long any operation of a tier may take.
        """
        if not load.can_be_made:
            return self._store.stuck_seconds
        return PIXEL_SECONDS + self._num_loading * (self._encoding_cost.seconds or UNKNOWN_ENCODING_SECONDS)

    def _take_answer(self, load: Load, epoch: int, array: StoredArray | None, tier: str | None) -> None:
        self._answers.append((load, epoch, array, tier))
        if threading.get_ident() != self._loop_thread:
            self._wake()

    def take_loaded(self) -> list[Loaded]:
        taken = []
        while self._answers:
            load, epoch, array, tier = self._answers.popleft()
            self._num_loading -= 1
            if array is not None and epoch == self._epoch and self._fits(load, array):
                taken.append(Loaded(load.encoder_key, array, tier))
                self._note_place(load.encoder_key, load.media_hash)
            else:
                taken.append(Loaded(load.encoder_key, None, None))
        return taken

    def _fits(self, load: Load, array: StoredArray) -> bool:
        expected = (self._format.dtype, (load.num_tokens, self._format.width))
        if (array.dtype, array.shape) == expected:
            return True
        logger.error("a tier returned an entry of %s %s instead of %s %s: ignored", array.dtype, array.shape, *expected)
        return False

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Return the media hashes of entries newly held and of those no longer held, once for each entry."""
        kept, dropped = list[str](), list[str]()
        while self._changed:
            name = self._changed.popleft()
            with self._lock:
                if (media_hash := self._media.get(name)) is None:
                    continue
                if self._store.find(name) is not None:
                    if name not in self._held:
                        self._held.add(name)
                        kept.append(media_hash)
                else:
                    del self._media[name]
                    if name in self._held:
                        self._held.remove(name)
                        dropped.append(media_hash)
        return kept, dropped

    @property
    def is_cleared(self) -> bool:
        return self._store.is_cleared

    def clear(self) -> None:
        """Clear all tiers soon. The loop is woken whenever one is cleared."""
        with self._storing:
            self._epoch += 1
            self._store.clear(self._wake)
        with self._lock:
            self._changed.extend(self._media)

    def list_unasked(self) -> frozenset[str]:
        """Return the tiers that a load would not ask now, as they are set aside."""
        return self._store.list_unasked()

    def list_holders(self, encoder_keys: Sequence[str]) -> tuple[str, ...]:
        """Return the tiers that are each known to hold all of these embeddings, nearest first."""
        holders = [self._store.list_holders(self._name(key)) for key in encoder_keys]
        return tuple(tier for tier in self.names if all(tier in its for its in holders))

    def note_uses(self, request: EngineRequest) -> None:
        """Record the request's uses of media in the trace, each at the mean cost of an encoding so far."""
        if self._trace is None:
            return
        now, seconds = time.time(), self._encoding_cost.seconds
        for item in request.media:
            num_bytes = item.span.length * self._format.num_bytes
            self._unrecorded_uses.append(Access(now, encoder_key(item, request.adapter), num_bytes, seconds))
        while seconds and self._unrecorded_uses:
            use = self._unrecorded_uses.popleft()
            self._trace.record(msgspec.structs.replace(use, key=self._name(use.key), seconds=seconds))

    def close(self) -> None:
        self._store.close()
        if self._trace is not None:
            self._trace.close()

    # On the runner's threads ----------------------------------------------------------------------------------

    def keeping(self) -> Callable[[Encoding, float, Callable[[], StoredArray]], None]:
        """Return a function that stores embeddings encoded from now on; after `clear` it stores nothing."""
        return partial(self._keep, self._epoch)

    def _keep(self, epoch: int, encoding: Encoding, seconds: float, make_array: Callable[[], StoredArray]) -> None:
        self._encoding_cost.note(seconds)
        if not self.names:
            return
        name = self._name(encoding.encoder_key)
        array = self._store.prepare(name, make_array())
        with self._storing:
            if epoch != self._epoch:
                return
            self._store.store(name, array)
        self._note_place(encoding.encoder_key, encoding.media_hash)

    def _note_place(self, encoder_key: str, media_hash: str) -> None:
        name = self._name(encoder_key)
        with self._lock:
            self._media[name] = media_hash
        self._changed.append(name)

    # Status ---------------------------------------------------------------------------------------------------

    def status(self) -> tuple[TierStatus, ...]:
        """Return the status of each tier, nearest first."""
        return tier_statuses(self._store, "encoder")

    def check_invariants(self) -> None:
        with self._lock:
            assert self._held <= self._media.keys()
        self._store.check_invariants()
