"""Counts the media items for which the engine holds something, in any cache.

Each thing that can be found counts alike: embeddings, KV blocks, pixels. Invariant: the items held when changes were
last taken, with the changes since, are the items held now.
"""

from collections import Counter
from collections.abc import Iterable

from keepsight.requests import MediaDropped, MediaHeld


class Holdings:
    def __init__(self, within: "Holdings | None" = None) -> None:
        """Initialize; `within` counts all kinds of things, if this counts one kind."""
        self._within = within
        self._counts: Counter[str] = Counter()
        # Items that became held, or stopped being held, since changes were last taken; in the order of their change.
        self._changed: dict[str, None] = {}

    def __contains__(self, media_hash: str) -> bool:
        return media_hash in self._counts

    def add(self, media_hash: str) -> None:
        if media_hash not in self._counts:
            self._flip(media_hash)
        self._counts[media_hash] += 1
        if self._within is not None:
            self._within.add(media_hash)

    def remove(self, media_hash: str) -> None:
        assert media_hash in self._counts, f"nothing of {media_hash} is held"
        self._counts[media_hash] -= 1
        if not self._counts[media_hash]:
            del self._counts[media_hash]
            self._flip(media_hash)
        if self._within is not None:
            self._within.remove(media_hash)

    def _flip(self, media_hash: str) -> None:
        """Note that an item became held or stopped being held; two flips cancel out."""
        if media_hash in self._changed:
            del self._changed[media_hash]
        else:
            self._changed[media_hash] = None

    def take_changes(self) -> list[MediaHeld | MediaDropped]:
        """Return the changes since the last call, as messages."""
        if not self._changed:  # as after most steps
            return []
        held, dropped = self.take_names()
        return ([MediaHeld(held)] if held else []) + ([MediaDropped(dropped)] if dropped else [])

    def take_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the changes since the last call: the hashes that are held now, and those that no longer are."""
        changed, self._changed = self._changed, {}
        held = tuple(each for each in changed if each in self._counts)
        return held, tuple(each for each in changed if each not in self._counts)

    def list_held(self) -> list[MediaHeld]:
        """List everything held, for a receiver that got no earlier changes."""
        return [MediaHeld(tuple(self._counts))] if self._counts else []

    def check_invariants(self, media_hashes: Iterable[str]) -> None:
        """Check against a recount, which names the media item of each thing that can be found."""
        assert self._counts == Counter(media_hashes)
        assert all(count > 0 for count in self._counts.values())
