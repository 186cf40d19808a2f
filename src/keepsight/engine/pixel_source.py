"""The engine's side of the pixel cache: finds the pixels that need not be requested, and reads those that arrive.

Knows neither requests nor the schedule; used only by the engine loop. A location given by a frontend is trusted only if
what lies there proves it: a stale or forged handle gives None, never other pixels. Pixels whose embeddings are held are
not needed, but may be again: where this side has a say in eviction (`lru`, `shared`), they are evicted first.
"""

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from keepsight.config import Config
from keepsight.ipc.pixel_mode import PixelMode, cache_bytes
from keepsight.ipc.shared_store import SharedStore
from keepsight.ipc.shm_ring import RingReader
from keepsight.lru_cache import CacheSize, LruCache
from keepsight.pixels import agree, as_kept, held_bytes
from keepsight.requests import MediaArrived, Pixels, RingPlace, StoredPixels


class PixelSource:
    """The source for `none` and `processor_only`: keeps nothing; pixels come with their messages."""

    # How many kept pixels were compared with those made anew from their picture, and how many of them differed.
    num_verified = num_mismatched = 0

    def find(self, media_hash: str, *, may_hold_back: bool = True) -> Pixels | None:
        """Return kept pixels. With `may_hold_back` (they can be made again), a hit may be withheld for comparison."""
        return None

    def receive(self, message: MediaArrived) -> Pixels | None:
        """Return the pixels that have arrived; None if they are not where the message says."""
        return message.pixels if isinstance(message.pixels, np.ndarray) else None

    def touch(self, media_hashes: Iterable[str]) -> None:
        """Evict what is kept of a new request last, or pixels that arrive for it would evict others that it needs.

        Nothing to do where frontends keep the pixels: they touch them there.
        """

    def take_changes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the media hashes that `find` has come to know, and those it no longer knows, since the last call."""
        return (), ()

    def note_embeddings(self, held: Iterable[str], dropped: Iterable[str]) -> None:
        """Note the media hashes whose embeddings the engine now holds, and those whose it no longer holds."""

    def size(self) -> CacheSize | None:
        """Return the size of what is kept here; None if nothing is."""
        return None

    def clear(self) -> None:
        """Drop what is kept here. Frontends clear what they keep or share; that may already hold newer pixels."""

    def close(self) -> None: ...


def open_pixel_source(mode: PixelMode, config: Config, folder: Path | None) -> PixelSource:
    """Open the source for a mode. `folder` is the run directory, without which nothing is shared."""
    if mode == "lru":
        return KeptPixels(cache_bytes(config), config.verify_hits)
    if mode in ("shm", "shared"):
        assert folder is not None, mode
        if mode == "shm":
            return RingSource(folder)
        # If hits are to be verified, the frontends do it, so they have to be asked.
        return StoreSource(SharedStore(folder, cache_bytes(config)), looks_first=not config.verify_hits)
    return PixelSource()


class KeptPixels(PixelSource):
    """The source for `lru`: keeps the pixels that have arrived."""

    def __init__(self, max_bytes: int, verify_hits: float = 0.0) -> None:
        """`verify_hits` is the fraction of hits, 0 to 1, that are requested anyway and compared."""
        self._cache = LruCache[str, Pixels](max_bytes, held_bytes, on_drop=self._note_dropped)
        self._verify_hits = verify_hits
        # Hits that were requested anyway and have not arrived yet.
        self._held_back: set[str] = set()
        # Media hashes added or dropped since the last `take_changes` -> whether they are held now.
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
        if held is not None and self._agrees(message.media_hash, held, pixels):
            return held
        kept = as_kept(pixels)
        if self._cache.put_if_fits(message.media_hash, kept):
            self._changes[message.media_hash] = True
        return kept

    def touch(self, media_hashes: Iterable[str]) -> None:
        for media_hash in media_hashes:
            self._cache.touch(media_hash)

    def _agrees(self, media_hash: str, held: Pixels, pixels: Pixels) -> bool:
        """Return False if `held` was compared and differs. The engine loop has time to compare held-back hits only."""
        if held is pixels or media_hash not in self._held_back:
            return True
        self._held_back.remove(media_hash)
        self.num_verified += 1
        if agree(media_hash, held, pixels):
            return True
        self.num_mismatched += 1
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
    """The source for `shm`: copies pixels out of whichever ring the frontend names."""

    def __init__(self, folder: Path) -> None:
        self._reader = RingReader(folder)

    def receive(self, message: MediaArrived) -> Pixels | None:
        if isinstance(message.pixels, RingPlace):
            return self._reader.read(message.pixels)
        return super().receive(message)

    def close(self) -> None:
        self._reader.close()


class StoreSource(PixelSource):
    """The source for `shared`: looks where any frontend may have put pixels, and reads them in place."""

    def __init__(self, store: SharedStore, *, looks_first: bool = True) -> None:
        self._store, self._looks_first = store, looks_first
        # Embeddings held by an engine that has ended are gone: their pixels are needed again.
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
    """Evict pixels first while their embeddings are held; for either kind of cache."""
    for media_hash in held:
        cache.evict_first(media_hash)
    for media_hash in dropped:
        cache.undo_evict_first(media_hash)
