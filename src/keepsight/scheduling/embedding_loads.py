"""Which embeddings are being fetched from where they outlive the device's memory, and which have come: plain values.

Table of a key's states, as long as a live sequence has use for it:
  unasked   asked for                          -> loading
  loading   came / lies nowhere, or is too late -> ready / absent
  ready     placed in the encoder cache        -> unasked
  absent    encoded, or failed to be           -> unasked
Knows nothing of tiers, bytes or clocks.  Invariant: what is ready lies with the runner until it is placed or told to be
unneeded, each once.
"""

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from keepsight.scheduling.request_state import RequestState

# Each takes its asker 20 to 80 us: the engine's loop asks, and many hundreds may arrive together.
MAX_AT_ONCE = 16


class Load(NamedTuple):
    """Embeddings that are wanted, wherever they may be."""

    encoder_key: str
    media_hash: str
    num_tokens: int


class LoadState(Enum):
    LOADING = "loading"
    READY = "ready"
    ABSENT = "absent"


class EmbeddingLoads:
    def __init__(self, *, has_tiers: bool) -> None:
        """Without tiers everything is absent."""
        self._has_tiers = has_tiers
        self._states: dict[str, LoadState] = {}
        # Live sequences that name the key, once for each of their items.
        self._live: Counter[str] = Counter()
        # Of what is loading: who waits.
        self._askers: dict[str, dict[RequestState, None]] = {}
        # Not handed out yet.
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
        """What is known of the embeddings of one of its items; if that is nothing, they are asked for."""
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
        """Who waited; None if nobody does any more, or what came is not wanted."""
        if self._states.get(key) is not LoadState.LOADING:
            return None
        self._states[key] = LoadState.READY if is_found else LoadState.ABSENT
        if is_found and key in self._unneeded:
            # It came for others before, and the runner has not been told yet that these left.
            self._unneeded.remove(key)
        return self._askers.pop(key, {})

    def place(self, key: str) -> None:
        assert self._states[key] is LoadState.READY, key
        del self._states[key]

    def note_encoded(self, key: str) -> None:
        """Or not; where it lies from now on is to be asked anew."""
        if self._states.get(key) is LoadState.ABSENT:
            del self._states[key]

    def forget(self) -> None:
        """What has come is not to be used; what is loading may come in vain, for whoever asked before."""
        for key in [key for key, state in self._states.items() if state is not LoadState.LOADING]:
            self._give_up(key)

    def _give_up(self, key: str) -> None:
        if self._states.pop(key, None) is LoadState.READY:
            self._unneeded.append(key)

    def take_wanted(self) -> list[Load]:
        """What tiers are to be asked for, the first of it: there is more only if some are returned."""
        wanted = [load for key, load in self._wanted.items() if self._states.get(key) is LoadState.LOADING]
        self._wanted = {load.encoder_key: load for load in wanted[MAX_AT_ONCE:]}
        return wanted[:MAX_AT_ONCE]

    def take_unneeded(self) -> list[str]:
        taken, self._unneeded = self._unneeded, []
        return taken

    def check_invariants(self) -> None:
        assert self._states.keys() <= self._live.keys()
        assert all(count > 0 for count in self._live.values())
        loading = {key for key, state in self._states.items() if state is LoadState.LOADING}
        assert self._askers.keys() <= loading
