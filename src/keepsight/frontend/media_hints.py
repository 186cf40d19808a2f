"""What a frontend believes the engine to hold of each picture, and what it has promised to send unasked.

A hint: the engine's word is final, and it asks for what it lacks.  Invariant: nothing promised is believed to be held,
each promise belongs to one request, and there are never more than `max_promises`.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable

# Pixels that come unasked wait with the engine, so there must not be many; when it is busy it may as well ask.
MAX_PROMISES = 16
# Two orders more than engines hold.  Who is forgotten is promised once too often.
MAX_HELD = 1_000_000


class MediaHints:
    def __init__(self, max_promises: int = MAX_PROMISES, max_held: int = MAX_HELD) -> None:
        self._max_promises, self._max_held = max_promises, max_held
        self._lock = threading.Lock()
        # Longest known first.
        self._held: OrderedDict[str, None] = OrderedDict()
        # Media hash -> the request that promised it.
        self._promised: dict[str, str] = {}

    def promise(self, request_id: str, media_hashes: Iterable[str]) -> tuple[str, ...]:
        """Those that the engine knows nothing of, so far as more can be promised: to be made at once."""
        promised = []
        with self._lock:
            for media_hash in media_hashes:
                if len(self._promised) >= self._max_promises:
                    break
                if media_hash not in self._held and media_hash not in self._promised:
                    self._promised[media_hash] = request_id
                    promised.append(media_hash)
        return tuple(promised)

    def has_room_for(self, num_promises: int) -> bool:
        with self._lock:
            return len(self._promised) + num_promises <= self._max_promises

    def is_held(self, media_hash: str) -> bool:
        """By the engine, so far as is known."""
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
        """It has ended, and with it what it promised."""
        with self._lock:
            self._promised = {each: promiser for each, promiser in self._promised.items() if promiser != request_id}

    def check_invariants(self) -> None:
        with self._lock:
            assert self._held.keys().isdisjoint(self._promised)
            assert len(self._promised) <= self._max_promises
            assert len(self._held) <= self._max_held
