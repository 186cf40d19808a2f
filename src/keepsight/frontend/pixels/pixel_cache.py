"""The frontend's cache of the pixels that it made, and what it sends to the engine for them: one class for each mode.

Knows neither how pixels are made nor who asks for them. A cache never fails for lack of room: then the pixels
themselves are sent. Invariant: the value returned by `put` or `get_and_update`, sent to the engine's `PixelSource` of
the same mode, gives the pixels that were put, or is recognized there as stale.
"""

import logging
import mmap
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from keepsight.config import Config
from keepsight.errors import EverythingPinnedError
from keepsight.ipc.pixel_mode import PixelMode, cache_bytes
from keepsight.ipc.shared_store import SharedStore
from keepsight.ipc.shm_ring import RingWriter
from keepsight.lru_cache import PINNABLE_PART, CacheSize, LruCache
from keepsight.observe.shared_page import share_or_keep
from keepsight.pixels import HeldPixels, as_kept, held_bytes, shape_of, show_a_picture
from keepsight.requests import CarriedPixels, Pixels, RingPlace, StoredPixels

logger = logging.getLogger(__name__)
Files = TypeVar("Files", bound=RingWriter | SharedStore)

MIB = 1 << 20
_MARK_BYTES = 8


class PixelCache:
    """Shared by threads. This base class keeps nothing; it serves mode `lru`, in which the engine keeps pixels."""

    # Whether all processes of the server share one cache.
    is_common: ClassVar[bool] = False
    # Whether pixels are kept anywhere, be it in the engine.
    is_any: ClassVar[bool] = True

    def size(self) -> CacheSize | None:
        """Return the cache's size; None if nothing is kept here."""
        return None

    @property
    def num_evictions(self) -> int:
        """The number of evictions by this process."""
        size = self.size()
        return 0 if size is None else size.num_evictions

    def touch(self, media_hash: str) -> None:
        """Move an entry to the end of the order of eviction, if there is one; counts as neither a hit nor a miss."""

    def get_and_update(self, media_hash: str) -> CarriedPixels | None:
        """Return what can be sent at once, if anything is kept."""
        return None

    def put(self, media_hash: str, pixels: Pixels) -> CarriedPixels:
        """Keep the pixels if possible; return what to send."""
        return pixels

    def read(self, media_hash: str) -> Pixels | None:
        return None

    def is_held(self, media_hash: str) -> bool:
        """Return whether an entry is kept; does not count as a use."""
        return False

    def look(self, media_hash: str) -> Pixels | None:
        """Like `read`, but does not count as a use."""
        return None

    def shows_a_picture(self, media_hash: str) -> bool:
        """Return whether the entry is kept and is not embeddings; does not count as a use."""
        pixels = self.look(media_hash)
        return pixels is not None and show_a_picture(pixels)

    def newest(self, limit: int) -> list[HeldPixels]:
        return []

    def pin(self, media_hash: str, seconds: float) -> bool:
        """Keep an entry for this time from now, whatever was said before, unless it is dropped.

        Returns False if that cannot be promised.
        """
        return False

    def unpin(self, media_hash: str) -> None:
        pass

    def making(self, media_hashes: Collection[str]) -> AbstractContextManager[None]:
        """Wait for other processes that are making these; then `get_and_update` may find them."""
        return nullcontext()

    def drop(self, media_hash: str) -> None:
        pass

    def clear(self) -> None:
        """Clear the caches of all frontends of the server: nothing that any of them keeps now is found afterwards.

        Raises OSError if that cannot be done.
        """

    def close(self) -> None:
        pass

    def check_invariants(self) -> None:
        pass


class NoPixelCache(PixelCache):
    """For mode `none`."""

    is_any = False


def open_pixel_cache(mode: PixelMode, config: Config, folder: Path | None = None) -> PixelCache:
    """Return the cache for a mode. `folder`: the run directory, without which nothing is shared."""
    if mode == "none":
        return NoPixelCache()
    if mode == "lru":
        return PixelCache()
    if mode in ("shm", "shared"):
        assert folder is not None, mode
        try:
            return _open_in_shared_memory(mode, config, folder)
        except OSError as error:
            # The engine accepts pixels themselves in any mode.
            logger.warning("processor cache: processor_only instead of %s, which failed: %s", mode, error)
    if folder is None:
        return LocalCache(cache_bytes(config))
    if_kept = "a reset will only clear the pixels of the frontend that receives it"
    return LocalCache(cache_bytes(config), share_or_keep(folder, "reset", _MARK_BYTES, if_kept))


def _open_in_shared_memory(mode: PixelMode, config: Config, folder: Path) -> PixelCache:
    if mode == "shared":
        return StoreCache(SharedStore(folder, cache_bytes(config)))
    max_object_bytes = int(config.mm_shm_cache_max_object_size_mb * MIB)
    return RingCache(RingWriter(folder, cache_bytes(config), max_object_bytes))


class LocalCache(PixelCache):
    """For mode `processor_only`: keeps pixels in this process, until any frontend clears its cache."""

    def __init__(self, max_bytes: int, reset_mark: mmap.mmap | bytearray | None = None) -> None:
        """`reset_mark`: memory that all frontends share, and in which each clear leaves a new mark."""
        self._reset_mark = reset_mark or bytearray(_MARK_BYTES)
        self._lock, self._mark = threading.Lock(), bytes(self._reset_mark)
        self._cache = LruCache[str, Pixels](max_bytes, held_bytes)
        self._max_pinned_bytes = int(max_bytes * PINNABLE_PART)
        # When each pin ends, by media hash.
        self._pins: dict[str, float] = {}

    def size(self) -> CacheSize:
        with self._after_resets():
            return self._cache.size()

    def touch(self, media_hash: str) -> None:
        with self._after_resets():
            self._cache.touch(media_hash)

    def get_and_update(self, media_hash: str) -> Pixels | None:
        with self._after_resets():
            return self._cache.get_and_update(media_hash)

    def put(self, media_hash: str, pixels: Pixels) -> Pixels:
        kept = as_kept(pixels)
        with self._after_resets(), suppress(EverythingPinnedError):
            self._end_pins()
            self._cache.put_if_fits(media_hash, kept)
        return kept

    def read(self, media_hash: str) -> Pixels | None:
        return self.get_and_update(media_hash)

    def is_held(self, media_hash: str) -> bool:
        with self._after_resets():
            return self._cache.is_cached(media_hash)

    def look(self, media_hash: str) -> Pixels | None:
        with self._after_resets():
            return self._cache.look(media_hash)

    def newest(self, limit: int) -> list[HeldPixels]:
        with self._after_resets():
            self._end_pins()
            return [
                HeldPixels(each, self._cache.bytes_of(each), each in self._pins) for each in self._cache.newest(limit)
            ]

    def pin(self, media_hash: str, seconds: float) -> bool:
        with self._after_resets():
            self._end_pins()
            if not self._cache.is_cached(media_hash):
                return False
            if media_hash not in self._pins:
                if self._cache.num_pinned_bytes + self._cache.bytes_of(media_hash) > self._max_pinned_bytes:
                    return False
                self._cache.pin(media_hash)
            self._pins[media_hash] = time.monotonic() + seconds
            return True

    def unpin(self, media_hash: str) -> None:
        with self._after_resets():
            self._unpin(media_hash)

    def drop(self, media_hash: str) -> None:
        with self._after_resets():
            self._unpin(media_hash)
            self._cache.drop(media_hash)

    def clear(self) -> None:
        # Random and not a counter: two concurrent clears must not leave the same mark.
        self._reset_mark[:] = secrets.token_bytes(_MARK_BYTES)
        with self._after_resets():
            pass

    def close(self) -> None:
        with self._lock:
            self._forget_all()

    def check_invariants(self) -> None:
        with self._lock:
            self._cache.check_invariants()
            assert all(self._cache.is_cached(each) for each in self._pins)

    @contextmanager
    def _after_resets(self) -> Iterator[None]:
        """Hold the lock, after dropping everything from before the last reset by any frontend."""
        with self._lock:
            if (mark := bytes(self._reset_mark)) != self._mark:
                self._mark = mark
                self._forget_all()
            yield

    def _forget_all(self) -> None:
        for media_hash in list(self._pins):
            self._unpin(media_hash)
        self._cache.clear()

    def _end_pins(self) -> None:
        now = time.monotonic()
        for media_hash in [each for each, end in self._pins.items() if end <= now]:
            self._unpin(media_hash)

    def _unpin(self, media_hash: str) -> None:
        if self._pins.pop(media_hash, None) is not None:
            self._cache.unpin(media_hash)


class _CacheInFiles(PixelCache, Generic[Files]):
    """A cache in memory that other processes share: pixels are written there, and their place is sent."""

    def __init__(self, files: Files) -> None:
        self._files = files

    @property
    def num_evictions(self) -> int:
        return self._files.num_evictions

    def size(self) -> CacheSize:
        return self._files.size()

    def read(self, media_hash: str) -> Pixels | None:
        return self._files.read(media_hash)

    def newest(self, limit: int) -> list[HeldPixels]:
        return self._files.newest(limit)

    def drop(self, media_hash: str) -> None:
        self._files.drop(media_hash)

    def clear(self) -> None:
        self._files.clear()

    def close(self) -> None:
        self._files.close()

    def check_invariants(self) -> None:
        self._files.check_invariants()


class RingCache(_CacheInFiles[RingWriter]):
    """For mode `shm`: the ring that this frontend writes. It evicts first in, first out, so nothing can be pinned."""

    _has_warned = False

    def get_and_update(self, media_hash: str) -> RingPlace | None:
        return self._files.find(media_hash)

    def put(self, media_hash: str, pixels: Pixels) -> CarriedPixels:
        place = self._files.put(media_hash, pixels)
        if place is None and self._files.is_too_large(pixels) and not self._has_warned:
            self._has_warned = True
            logger.warning("%d bytes do not fit into the ring: such items are served, but not cached", pixels.nbytes)
        return pixels if place is None else place

    def is_held(self, media_hash: str) -> bool:
        return self._files.find(media_hash) is not None

    def look(self, media_hash: str) -> Pixels | None:
        return self._files.read(media_hash)

    def shows_a_picture(self, media_hash: str) -> bool:
        # `look` would copy it.
        place = self._files.find(media_hash)
        return place is not None and show_a_picture(place)


class StoreCache(_CacheInFiles[SharedStore]):
    """For mode `shared`: the store that all processes of the server read and write."""

    is_common = True

    def touch(self, media_hash: str) -> None:
        self._files.touch(media_hash)

    def get_and_update(self, media_hash: str) -> StoredPixels | None:
        pixels = self._files.read(media_hash)
        return None if pixels is None else StoredPixels(shape_of(pixels))

    def put(self, media_hash: str, pixels: Pixels) -> CarriedPixels:
        return StoredPixels(shape_of(pixels)) if self._files.put(media_hash, pixels) else pixels

    def is_held(self, media_hash: str) -> bool:
        return self._files.is_held(media_hash)

    def look(self, media_hash: str) -> Pixels | None:
        return self._files.look(media_hash)

    def pin(self, media_hash: str, seconds: float) -> bool:
        return self._files.pin(media_hash, seconds)

    def unpin(self, media_hash: str) -> None:
        self._files.unpin(media_hash)

    def making(self, media_hashes: Collection[str]) -> AbstractContextManager[None]:
        return self._files.making(media_hashes)
