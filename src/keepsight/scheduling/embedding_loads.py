"""Tracks which embeddings are being loaded from tiers and which have arrived: plain values only.

States of a key, for as long as a live sequence names it:
  unasked   asked for                          -> loading
  loading   found / not found, or too late     -> ready / absent
  ready     placed in the encoder cache        -> unasked
  absent    encoded, or failed to be           -> unasked
Knows nothing of tiers, bytes or clocks. Invariant: the runner holds ready embeddings until they are either placed or
reported as unneeded, once.
"""

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from keepsight.scheduling.request_state import RequestState

# Each query takes 20 to 80 us of the engine's loop, and many hundreds may come together.
MAX_AT_ONCE = 16


class Load(NamedTuple):
    """Embeddings to be looked for in the tiers."""

    encoder_key: str
    media_hash: str
    num_tokens: int
    # False if no request that waits for them has the media item itself: if they are not found, these fail.
    can_be_made: bool = True


class LoadState(Enum):
    LOADING = "loading"
    READY = "ready"
    ABSENT = "absent"


class EmbeddingLoads:
    def __init__(self, *, has_tiers: bool) -> None:
        """Initialize; without tiers everything is absent."""
        self._has_tiers = has_tiers
        self._states: dict[str, LoadState] = {}
        # How often live sequences name each key, once for each of their items.
        self._live: Counter[str] = Counter()
        # The sequences that wait for each loading key.
        self._askers: dict[str, dict[RequestState, None]] = {}
        # Loads that are not handed out yet.
        self._wanted: dict[str, Load] = {}
        self._unneeded: list[str] = []

    def add(self, state: RequestState) -> None:
        self._live.update(state.encoder_keys)

    def remove(self, state: RequestState) -> None:
        for key in state.encoder_keys:
            self._live[key] -= 1
            if key in self._askers:
                self._askers[key].pop(state, None)
            if not self._live[key]:
                del self._live[key]
                self._askers.pop(key, None)
                self._give_up(key)

    def ask(self, state: RequestState, index: int) -> LoadState:
        """Return the state of an item's embeddings; if it is unasked, ask for them."""
        if not self._has_tiers:
            return LoadState.ABSENT
        key, item = state.encoder_keys[index], state.media[index]
        if key not in self._states:
            self._states[key] = LoadState.LOADING
            self._wanted[key] = Load(key, item.media_hash, item.span.length)
        if self._states[key] is LoadState.LOADING:
            self._askers.setdefault(key, {}).setdefault(state)
        return self._states[key]

    def is_ready(self, key: str) -> bool:
        return self._states.get(key) is LoadState.READY

    def end(self, key: str, *, is_found: bool) -> Iterable[RequestState] | None:
        """End a load. Return the sequences that waited; None if the key is not loading, so the result is unwanted."""
        if self._states.get(key) is not LoadState.LOADING:
            return None
        self._states[key] = LoadState.READY if is_found else LoadState.ABSENT
        if is_found and key in self._unneeded:
            # An earlier load brought it for sequences that left, and the runner has not yet been told to drop it.
            self._unneeded.remove(key)
        return self._askers.pop(key, {})

    def place(self, key: str) -> None:
        assert self._states[key] is LoadState.READY, key
        del self._states[key]

    def note_encoded(self, key: str) -> None:
        """Note that encoding ended, successfully or not; the tiers may be asked again."""
        if self._states.get(key) is LoadState.ABSENT:
            del self._states[key]

    def forget(self) -> None:
        """Give up whatever is not loading; loads under way still end for those who asked."""
        for key in [key for key, state in self._states.items() if state is not LoadState.LOADING]:
            self._give_up(key)

    def _give_up(self, key: str) -> None:
        if self._states.pop(key, None) is LoadState.READY:
            self._unneeded.append(key)

    def take_wanted(self) -> list[Load]:
        """Return the next loads to ask the tiers for; more may follow unless this is empty."""
        wanted = [load for key, load in self._wanted.items() if self._states.get(key) is LoadState.LOADING]
        self._wanted = {load.encoder_key: load for load in wanted[MAX_AT_ONCE:]}
        return [load._replace(can_be_made=self._can_be_made(load)) for load in wanted[:MAX_AT_ONCE]]

    def _can_be_made(self, load: Load) -> bool:
        askers = self._askers.get(load.encoder_key)
        return not askers or any(load.media_hash not in state.request.unsent_media for state in askers)

    def take_unneeded(self) -> list[str]:
        taken, self._unneeded = self._unneeded, []
        return taken

    def check_invariants(self) -> None:
        assert self._states.keys() <= self._live.keys()
        assert all(count > 0 for count in self._live.values())
        loading = {key for key, state in self._states.items() if state is LoadState.LOADING}
        assert self._askers.keys() <= loading
