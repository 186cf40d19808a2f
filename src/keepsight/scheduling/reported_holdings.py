"""Tracks media data that other parts of the engine report to keep: pixels in a cache, embeddings in tiers.

Invariant: each thing that is kept is counted once in the holdings of its kind.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from keepsight.scheduling.holdings import Holdings


class ReportedHoldings:
    def __init__(self, holdings: Holdings, held_embeddings: Holdings) -> None:
        self._holdings, self._held_embeddings = holdings, held_embeddings
        self._pixels: set[str] = set()
        # One media item may have several entries.
        self._embeddings: Counter[str] = Counter()

    def note_pixels(self, kept: Iterable[str], dropped: Iterable[str]) -> None:
        """Note which items the pixel cache now keeps and which it dropped; repeated reports are harmless."""
        for media_hash in dropped:
            if media_hash in self._pixels:
                self._pixels.remove(media_hash)
                self._holdings.remove(media_hash)
        for media_hash in kept:
            if media_hash not in self._pixels:
                self._pixels.add(media_hash)
                self._holdings.add(media_hash)

    def note_embeddings(self, kept: Iterable[str], dropped: Iterable[str]) -> None:
        """Note the media of entries that were added to the tiers, and of added ones that were dropped."""
        for media_hash in kept:
            self._embeddings[media_hash] += 1
            self._held_embeddings.add(media_hash)
        for media_hash in dropped:
            self._embeddings[media_hash] -= 1
            if not self._embeddings[media_hash]:
                del self._embeddings[media_hash]
            self._held_embeddings.remove(media_hash)

    def held_pixels(self) -> Iterator[str]:
        return iter(self._pixels)

    def held_embeddings(self) -> Iterator[str]:
        """Yield the media hash of each entry in the tiers."""
        return self._embeddings.elements()
