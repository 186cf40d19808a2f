"""Knowledge from earlier requests: which names mean the same pixels, and the geometries of media.

Knows neither pictures nor pixels, only digests of them. Anything may be forgotten at any moment, the least recently
used first, and is then learned again. Invariant: a name that has aliases is not an alias itself.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from keepsight.frontend.identity.common_geometries import CommonGeometries
from keepsight.media import Geometry

# Per table: some 30 MB of names in all.
MAX_ENTRIES = 32_768

V = TypeVar("V")


class _Table(Generic[V]):
    """An LRU table in which a key keeps its first value for as long as it is known."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        # The least recently used first.
        self.entries: OrderedDict[str, V] = OrderedDict()

    def get(self, key: str) -> V | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def get_or_put(self, key: str, value: V) -> V:
        held = self.entries.setdefault(key, value)
        self.entries.move_to_end(key)
        if len(self.entries) > self._max_entries:
            self.entries.popitem(last=False)
        return held


class KnownMedia:
    """Shared by all requests; may be used from several threads."""

    def __init__(self, max_entries: int = MAX_ENTRIES, common: CommonGeometries | None = None) -> None:
        """`common`: given names and geometries shared with other frontends."""
        self._max_entries, self._common = max_entries, common
        self._lock = threading.Lock()
        # Two steps, so that there are neither chains nor cycles: media hash -> pixel hash -> the name they all go by.
        self._pixel_hashes = _Table[str](max_entries)
        self._first_names = _Table[str](max_entries)
        # Geometries by given name, and by the name of content that was looked at.
        self._geometries = _Table[Geometry](max_entries)
        self._looked_at = _Table[Geometry](max_entries)
        # The given names of which no pixels were made yet, as far as is known.
        self._unproven = _Table[Literal[True]](max_entries)
        # Returns whether anything made under a name is still held, as far as is known.
        self.is_held: Callable[[str], bool] = lambda _media_hash: True

    def canonical_name(self, media_hash: str) -> str:
        """Return the first name under which these pixels were made; its own if none is known or only that is held."""
        with self._lock:
            pixel_hash = self._pixel_hashes.get(media_hash)
            first_name = None if pixel_hash is None else self._first_names.get(pixel_hash)
            if pixel_hash is None or first_name is None:
                return media_hash
            if not self.is_held(first_name) and self.is_held(media_hash):
                # Made at the same time as the other, and kept longer: by a pin, or because it was used.
                self._first_names.entries[pixel_hash] = first_name = media_hash
            return first_name

    def learn_pixels(self, media_hash: str, pixel_hash: str) -> None:
        """Record pixels that were just made."""
        with self._lock:
            # A name whose pixels are not always the same must not become an alias.
            if self._pixel_hashes.get_or_put(media_hash, pixel_hash) != pixel_hash:
                return
            first_name = self._first_names.get_or_put(pixel_hash, media_hash)
            if first_name != media_hash and not self.is_held(first_name):
                # Otherwise they would be made once more, under a name for which nothing is held.
                self._first_names.entries[pixel_hash] = media_hash

    def recall_content(self, name: str) -> Geometry | None:
        with self._lock:
            return self._looked_at.get(name)

    def learn_content(self, name: str, geometry: Geometry) -> None:
        with self._lock:
            self._looked_at.get_or_put(name, geometry)

    def geometry_of(self, given_name: str) -> Geometry | None:
        with self._lock:
            return self._find_geometry(given_name)

    def remember_geometry(self, given_name: str, geometry: Geometry) -> Geometry:
        """Remember a geometry, unless an earlier one is known; return the one that is remembered."""
        with self._lock:
            return self._remember(given_name, geometry)

    def prove_geometry(self, given_name: str, geometry: Geometry) -> None:
        """Record that pixels of this geometry were made under the name. It may have been forgotten meanwhile."""
        with self._lock:
            if self._remember(given_name, geometry) == geometry:
                self._geometries.get_or_put(given_name, geometry)
                self._unproven.entries.pop(given_name, None)
                if self._common is not None and self._common.get(given_name) != (geometry, True):
                    self._common.put(given_name, geometry, is_proven=True)

    def forget_geometry(self, given_name: str) -> None:
        """Forget the geometry of a name that failed, unless it was made for another request that gave the name, too."""
        with self._lock:
            if given_name not in self._unproven.entries:
                return
            self._forget_own(given_name)
            if self._common is not None:
                self._common.forget_unproven(given_name)

    def _remember(self, given_name: str, geometry: Geometry) -> Geometry:
        known = self._find_geometry(given_name)
        if known is not None:
            return known
        self._unproven.get_or_put(given_name, True)
        if self._common is not None:
            self._common.put(given_name, geometry)
        return self._geometries.get_or_put(given_name, geometry)

    def _find_geometry(self, given_name: str) -> Geometry | None:
        """Return the geometry by which all frontends go. If it is another one's, that one may yet forget it."""
        own = self._geometries.get(given_name)
        if self._common is None:
            return own
        common, is_proven = self._common.get(given_name), given_name not in self._unproven.entries
        if own is None or (common is not None and common.geometry == own):
            return None if common is None else common.geometry
        if common is None or (is_proven and not common.is_proven):
            # The request that introduced it elsewhere has failed, or other names took its place.
            self._common.put(given_name, own, is_proven=is_proven)
            return own
        # Other names took its place, and another frontend has accepted another picture under it.
        self._forget_own(given_name)
        return common.geometry

    def _forget_own(self, given_name: str) -> None:
        self._geometries.entries.pop(given_name, None)
        self._unproven.entries.pop(given_name, None)

    def check_invariants(self) -> None:
        with self._lock:
            for table in (self._pixel_hashes, self._first_names, self._geometries, self._looked_at, self._unproven):
                assert len(table.entries) <= self._max_entries
            for pixel_hash, first_name in self._first_names.entries.items():
                # Its own pixel hash may have been forgotten, but is never a different one.
                assert self._pixel_hashes.entries.get(first_name, pixel_hash) == pixel_hash
