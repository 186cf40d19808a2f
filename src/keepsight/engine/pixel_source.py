"""The engine's side of where pixels are kept: finds those it need not ask for, and reads what arrives.

Knows neither requests nor the schedule; used by the engine's loop alone.  What a frontend says of a place is believed
only if what lies there proves it: a stale or forged handle gives None, never other pixels.  Pixels whose embeddings are
held are needed by nobody, but may be again: where this side has a say in what goes (`lru`, `shared`), they go first.
"""

import logging
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from keepsight.config import Config
from keepsight.ipc.pixel_mode import PixelMode, cache_bytes
from keepsight.ipc.shared_store import SharedStore
from keepsight.ipc.shm_ring import RingReader
from keepsight.lru_cache import CacheSize, LruCache
from keepsight.pixels import as_kept, held_bytes
from keepsight.requests import MediaArrived, Pixels, RingPlace, StoredPixels

logger = logging.getLogger(__name__)


class PixelSource:
    """Of `none` and `processor_only`: nothing is kept here, pixels come with their messages."""

    # Of what is kept here: compared with what its picture gives, and found to be something else.
    num_verified = num_mismatched = 0

    def find(self, media_hash: str, *, may_hold_back: bool = True) -> Pixels | None:
        """What need not be asked for; what nobody could make again is never held back to be compared."""
        return None

    def receive(self, message: MediaArrived) -> Pixels | None:
        """None: they are not where they were said to lie."""
        return message.pixels if isinstance(message.pixels, np.ndarray) else None

    def take_changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What `find` would give and did not, and the reverse, since this was last asked."""
        return (), ()

    def note_embeddings(self, held: Iterable[str], dropped: Iterable[str]) -> None:
        """Of what media the engine holds embeddings now and did not, and the reverse."""

    def size(self) -> CacheSize | None:
        """Of what is kept here; None: nothing is."""
        return None

    def clear(self) -> None:
        """Of what is kept here.  What frontends keep, or share, they cleared themselves, and may hold later pixels."""

    def close(self) -> None: ...


def open_pixel_source(mode: PixelMode, config: Config, folder: Path | None) -> PixelSource:
    """`folder`: the run directory, without which nothing is shared."""
    if mode == "lru":
        return KeptPixels(cache_bytes(config), config.verify_hits)
    if mode in ("shm", "shared"):
        assert folder is not None, mode
        if mode == "shm":
            return RingSource(folder)
        # Where hits are checked the frontends do it, so they have to be asked.
        return StoreSource(SharedStore(folder, cache_bytes(config)), looks_first=not config.verify_hits)
    return PixelSource()


class KeptPixels(PixelSource):
    """Of `lru`: what has arrived is kept here."""

    def __init__(self, max_bytes: int, verify_hits: float = 0.0) -> None:
        """So many of the hits, 0 to 1, are asked for all the same and compared."""
        self._cache = LruCache[str, Pixels](max_bytes, held_bytes, on_drop=self._note_dropped)
        self._verify_hits = verify_hits
        # Hits that were asked for all the same, and have not come yet.
        self._held_back: set[str] = set()
        # Whether it is held now, of each that came or went.
        self._changes: dict[str, bool] = {}

    def find(self, media_hash: str, *, may_hold_back: bool = True) -> Pixels | None:
        held = self._cache.get_and_update(media_hash)
        if held is None or not may_hold_back or random.random() >= self._verify_hits:
            return held
        self._held_back.add(media_hash)
        return None

    def receive(self, message: MediaArrived) -> Pixels | None:
        pixels = super().receive(message)
        if pixels is None:
            return None
        held = self._cache.get_and_update(message.media_hash)
        if held is not None and self._proves_right(message.media_hash, held, pixels):
            return held
        kept = as_kept(pixels)
        if self._cache.put_if_fits(message.media_hash, kept):
            self._changes[message.media_hash] = True
        return kept

    def _proves_right(self, media_hash: str, held: Pixels, pixels: Pixels) -> bool:
        """Compares only what was held back for it: the engine's loop has no time for every hit."""
        if held is pixels or media_hash not in self._held_back:
            return True
        self._held_back.remove(media_hash)
        self.num_verified += 1
        if np.array_equal(held, pixels):
            return True
        self.num_mismatched += 1
        logger.error("the processor cache held OTHER PIXELS under %s than its picture gives: dropped", media_hash)
        self._cache.drop(media_hash)
        return False

    def take_changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        changes, self._changes = self._changes, {}
        held = tuple(media_hash for media_hash, is_held in changes.items() if is_held)
        return held, tuple(media_hash for media_hash, is_held in changes.items() if not is_held)

    def note_embeddings(self, held: Iterable[str], dropped: Iterable[str]) -> None:
        _order(self._cache, held, dropped)

    def size(self) -> CacheSize:
        return self._cache.size()

    def clear(self) -> None:
        self._cache.clear()

    def close(self) -> None:
        self._cache.clear()

    def _note_dropped(self, media_hash: str) -> None:
        self._changes[media_hash] = False
        self._held_back.discard(media_hash)

    def check_invariants(self) -> None:
        self._cache.check_invariants()
        assert all(is_held == self._cache.is_cached(media_hash) for media_hash, is_held in self._changes.items())
        assert all(map(self._cache.is_cached, self._held_back))


class RingSource(PixelSource):
    """Of `shm`: copies out of the frontend's ring, whichever it is by now."""

    def __init__(self, folder: Path) -> None:
        self._reader = RingReader(folder)

    def receive(self, message: MediaArrived) -> Pixels | None:
        if isinstance(message.pixels, RingPlace):
            return self._reader.read(message.pixels)
        return super().receive(message)

    def close(self) -> None:
        self._reader.close()


class StoreSource(PixelSource):
    """Of `shared`: looks where any frontend may have put them, and reads them where they lie."""

    def __init__(self, store: SharedStore, *, looks_first: bool = True) -> None:
        self._store, self._looks_first = store, looks_first
        # What was held by an engine that has ended, is not.
        store.keep_all_again()

    def find(self, media_hash: str, *, may_hold_back: bool = True) -> Pixels | None:
        return self._store.read(media_hash) if self._looks_first else None

    def receive(self, message: MediaArrived) -> Pixels | None:
        if not isinstance(message.pixels, StoredPixels):
            return super().receive(message)
        pixels = self._store.read(message.media_hash)
        return pixels if pixels is not None and pixels.shape == message.pixels.shape else None

    def note_embeddings(self, held: Iterable[str], dropped: Iterable[str]) -> None:
        _order(self._store, held, dropped)

    def close(self) -> None:
        self._store.close()


def _order(cache: LruCache[str, Pixels] | SharedStore, held: Iterable[str], dropped: Iterable[str]) -> None:
    """The rule, for whichever cache."""
    for media_hash in held:
        cache.let_go_first(media_hash)
    for media_hash in dropped:
        cache.keep_again(media_hash)
