"""Between an engine and the tiers: keeps what was encoded, loads what is wanted, tells of which media they hold any.

Knows neither the schedule nor tensors, and never makes the engine's loop wait.  Invariant: each load is answered once,
and after `clear` never by what was kept or asked for before it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from keepsight.engine.tell_tiers import tell_tiers
from keepsight.observe.mean_cost import MeanCost
from keepsight.requests import EngineRequest, TierStatus
from keepsight.scheduling.embedding_loads import Load
from keepsight.scheduling.encoder_cache_manager import encoder_key
from keepsight.scheduling.step_plan import Encoding
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tiered_store import TieredStore
from keepsight.tiers.trace import Access, TraceRecorder

logger = logging.getLogger(__name__)
# Until a picture that is not held could be encoded: it is asked for, decoded, resized and sent, on a busy machine.
PIXEL_SECONDS = 0.2
# As long as nothing was encoded.
UNKNOWN_ENCODING_SECONDS = 1.0
# Uses that wait for the first encoding to tell what one takes.
MAX_UNTOLD_USES = 10_000


class Embeddings(NamedTuple):
    """What all entries of this model are alike in."""

    dtype: str
    width: int
    num_bytes: int


class Loaded(NamedTuple):
    """What was found and the tier that had it; None: it lies nowhere, or would come too late."""

    encoder_key: str
    array: StoredArray | None
    tier: str | None


class EmbeddingTiers:
    def __init__(
        self,
        store: TieredStore,
        name: Callable[[str], str],
        embeddings: Embeddings,
        wake: Callable[[], object],
        *,
        trace: TraceRecorder | None = None,
        dropped: deque[str] | None = None,
    ) -> None:
        """`name` makes an entry's of an encoder key; names that the store dropped come by `dropped`."""
        self._store, self._name, self._embeddings, self._wake, self._trace = store, name, embeddings, wake, trace
        self._lock = threading.Lock()
        # With the clearings before it was asked for.
        self._answers: deque[tuple[Load, int, StoredArray | None, str | None]] = deque()
        self._loop_thread = 0
        self._epoch = 0
        self._tier_names = tuple(store.stats())
        # Entries whose place may have changed, those whose media are known, and those said to be held.
        self._changed: deque[str] = deque() if dropped is None else dropped
        self._media: dict[str, str] = {}
        self._held: set[str] = set()
        self._num_loading = 0
        self._encoding_cost = MeanCost()
        # By encoder key.
        self._untold_uses: deque[Access] = deque(maxlen=MAX_UNTOLD_USES)

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    # On the engine's loop -------------------------------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Answered by `take_loaded`: at once if it lies in host memory or nowhere, else the loop is woken."""
        self._num_loading += 1
        self._loop_thread = threading.get_ident()
        self._store.load(self._name(load.encoder_key), self._patience(), partial(self._take_answer, load, self._epoch))

    def _patience(self) -> float:
        """What making it anew would take: those that are loading would be encoded one after the other."""
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
        expected = (self._embeddings.dtype, (load.num_tokens, self._embeddings.width))
        if (array.dtype, array.shape) == expected:
            return True
        logger.error("an entry of %s %s where %s %s was kept", array.dtype, array.shape, *expected)
        return False

    def take_changes(self) -> tuple[list[str], list[str]]:
        """Media hashes of entries that are held now and were not, and the reverse; once for each entry."""
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

    def clear(self) -> None:
        with self._lock:
            self._epoch += 1
            self._store.clear()
            self._changed.extend(self._media)

    def note_uses(self, request: EngineRequest) -> None:
        """For the trace: its uses cost what encodings have been seen to take."""
        if self._trace is None:
            return
        now, seconds = time.time(), self._encoding_cost.seconds
        for item in request.media:
            num_bytes = item.span.length * self._embeddings.num_bytes
            self._untold_uses.append(Access(now, encoder_key(item, request.adapter), num_bytes, seconds))
        while seconds and self._untold_uses:
            use = self._untold_uses.popleft()
            self._trace.record(msgspec.structs.replace(use, key=self._name(use.key), seconds=seconds))

    def close(self) -> None:
        self._store.close()
        if self._trace is not None:
            self._trace.close()

    # On the runner's threads ----------------------------------------------------------------------------------

    def keeping(self) -> Callable[[Encoding, float, Callable[[], StoredArray]], None]:
        """For what is encoded from now on, until everything is cleared."""
        return partial(self._keep, self._epoch)

    def _keep(self, epoch: int, encoding: Encoding, seconds: float, make_array: Callable[[], StoredArray]) -> None:
        self._encoding_cost.note(seconds)
        if not self._tier_names:
            return
        array = make_array()
        with self._lock:
            if epoch != self._epoch:
                return
            self._store.store(self._name(encoding.encoder_key), array)
        self._note_place(encoding.encoder_key, encoding.media_hash)

    def _note_place(self, encoder_key: str, media_hash: str) -> None:
        name = self._name(encoder_key)
        with self._lock:
            self._media[name] = media_hash
        self._changed.append(name)

    def list_asked(self, tier: str | None) -> Sequence[str]:
        """The tiers that were looked in, if this one had it, or none."""
        return self._tier_names if tier is None else self._tier_names[: self._tier_names.index(tier) + 1]

    # For whoever asks -----------------------------------------------------------------------------------------

    def status(self) -> tuple[TierStatus, ...]:
        """Of each tier, the nearest first."""
        return tell_tiers(self._store, "encoder")

    def check_invariants(self) -> None:
        with self._lock:
            assert self._held <= self._media.keys()
        self._store.check_invariants()
