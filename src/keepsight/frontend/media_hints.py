"""A frontend's record of the media that an engine is believed to hold, and of the pixels promised to it unasked.

Only hints: the engine's word is final, and it asks for what it lacks. Invariant: nothing promised is believed to be
held, each promise belongs to one request, and there are never more than `max_promises`.
"""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable

# Unasked pixels wait in the engine's memory, so there must not be many; a busy engine may as well ask.
MAX_PROMISES = 16
# Two orders of magnitude more than engines hold. A forgotten item is promised once too often.
MAX_HELD = 1_000_000


class MediaHints:
    def __init__(self, max_promises: int = MAX_PROMISES, max_held: int = MAX_HELD) -> None:
        self._max_promises, self._max_held = max_promises, max_held
        self._lock = threading.Lock()
        # The item known longest comes first.
        self._held: OrderedDict[str, None] = OrderedDict()
        # Media hash -> the request that promised it.
        self._promised: dict[str, str] = {}

    def promise(self, request_id: str, media_hashes: Collection[str]) -> tuple[str, ...]:
        """Promise what the engine has neither got nor been promised; return it, to be made at once.

        Nothing is promised if all of `media_hashes` would exceed the limit.
        """
        with self._lock:
            if len(self._promised) + len(media_hashes) > self._max_promises:
                return ()
            new = dict.fromkeys(each for each in media_hashes if each not in self._held and each not in self._promised)
            self._promised |= dict.fromkeys(new, request_id)
            return tuple(new)

    def is_held(self, media_hash: str) -> bool:
        """Return whether the engine is believed to hold it."""
        with self._lock:
            return media_hash in self._held

    def note_held(self, media_hashes: Iterable[str]) -> None:
        with self._lock:
            for media_hash in media_hashes:
                self._promised.pop(media_hash, None)
                self._held[media_hash] = None
            while len(self._held) > self._max_held:
                self._held.popitem(last=False)

    def note_dropped(self, media_hashes: Iterable[str]) -> None:
        with self._lock:
            for media_hash in media_hashes:
                self._held.pop(media_hash, None)

    def forget(self, request_id: str) -> None:
        """Drop the promises of a request that has ended."""
        with self._lock:
            self._promised = {each: promiser for each, promiser in self._promised.items() if promiser != request_id}

    def check_invariants(self) -> None:
        with self._lock:
            assert self._held.keys().isdisjoint(self._promised)
            assert len(self._promised) <= self._max_promises
            assert len(self._held) <= self._max_held
