"""Pins of pixels in the processor cache, by all who may hold one: handles, requests with breakpoints, administrators.

Knows neither HTTP nor how pixels are kept. Invariant: pixels that were pinned stay so until the last of their holders'
pins ends, and no longer. The table in `MediaHandles`, common to all frontends, says who holds what; this process's
cache follows it.
"""

import time

from keepsight.frontend.intake.media_handles import MediaHandles, PinHolder
from keepsight.frontend.pixels.pixel_cache import PixelCache


class PixelPins:
    def __init__(self, table: MediaHandles | None, cache: PixelCache) -> None:
        """Without a `table`, only one is known to hold pins: the last who asked."""
        self._table, self._cache = table, cache

    def pin(self, holder: PinHolder, media_hash: str, seconds: float) -> bool:
        """Pin pixels for at least `seconds`; return whether they are pinned.

        Raises MediaStoreError, and UnknownHandleError if the holder is a handle that has gone.
        """
        if self._table is None:
            return self._cache.pin(media_hash, seconds)
        former = self._table.end_of_pin(holder, media_hash)
        if not self._table.hold_pin(holder, media_hash, seconds):
            return False
        is_pinned = self._follow(self._table, media_hash)
        if not is_pinned:
            # Another frontend's cache may follow the former pin.
            self._table.take_back_pin(holder, media_hash, former)
            self._follow(self._table, media_hash)
        return is_pinned

    def unpin(self, media_hash: str) -> None:
        """End all pins of these pixels, whoever holds them."""
        if self._table is None:
            self._cache.unpin(media_hash)
        else:
            self._table.end_all_pins(media_hash)
            self._follow(self._table, media_hash)

    def delete(self, holder: PinHolder) -> None:
        """Delete a handle with its pins. Raises MediaStoreError and UnknownHandleError."""
        assert self._table is not None
        for media_hash in self._table.delete(*holder):
            self._follow(self._table, media_hash)

    def _follow(self, table: MediaHandles, media_hash: str) -> bool:
        """Pin pixels as long as the table says by now, or unpin them; return whether they are pinned."""
        end = table.end_of_pins(media_hash)
        while True:
            if end is None:
                self._cache.unpin(media_hash)
            is_pinned = end is not None and self._cache.pin(media_hash, max(0.0, end - time.monotonic()))
            # Again if it was changed meanwhile: whoever changed it may have told the cache before this did.
            if (changed := table.end_of_pins(media_hash)) == end:
                return is_pinned
            end = changed
