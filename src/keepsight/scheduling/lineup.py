"""Tracks where each live sequence is: in line for a seat, seated, or parked until what it waits for has come.

Keeps the sequences in order and changes their status; why they move is decided elsewhere.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from keepsight.scheduling.request_state import ParkedFor, RequestState, Status

by_order = attrgetter("order")


class Lineup:
    def __init__(self) -> None:
        self.waiting: list[RequestState] = []  # both lists are kept in order
        self.running: list[RequestState] = []
        self.parked: set[RequestState] = set()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.parked)

    @property
    def num_unseated(self) -> int:
        return len(self) - len(self.running)

    @property
    def num_kept_waiting(self) -> int:
        """The number of sequences that wait only because others are computed first."""
        return len(self.waiting) + sum(state.parked_for is ParkedFor.LANE for state in self.parked)

    @property
    def num_tokens_to_compute(self) -> int:
        """The number of tokens that running sequences still lack, as far as these are known."""
        return sum(state.num_tokens - state.num_computed for state in self.running)

    def add(self, state: RequestState) -> None:
        insort(self.waiting, state, key=by_order)

    def seat(self, state: RequestState) -> None:
        self.waiting.remove(state)
        state.change_to(Status.RUNNING)
        insort(self.running, state, key=by_order)

    def unseat(self, state: RequestState) -> None:
        """Put a running sequence back in line."""
        self.running.remove(state)
        state.change_to(Status.WAITING)
        self.add(state)

    def park(self, state: RequestState, reason: ParkedFor) -> None:
        self._take_out(state)
        state.change_to(Status.PARKED, reason)
        self.parked.add(state)

    def unpark(self, state: RequestState) -> None:
        self.parked.remove(state)
        state.change_to(Status.WAITING)
        self.add(state)

    def parked_for(self, reason: ParkedFor) -> list[RequestState]:
        """Return the sequences parked for this reason, in order."""
        return sorted((state for state in self.parked if state.parked_for is reason), key=by_order)

    def unpark_these(self, states: Iterable[RequestState], *reasons: ParkedFor) -> list[RequestState]:
        """Unpark those of the sequences that are parked for one of the reasons, and return them."""
        parked = [state for state in states if state.parked_for in reasons]
        for state in parked:
            self.unpark(state)
        return parked

    def finish(self, state: RequestState) -> None:
        self._take_out(state)
        state.change_to(Status.FINISHED)

    def _take_out(self, state: RequestState) -> None:
        if state.status is Status.PARKED:
            self.parked.remove(state)
        else:
            (self.running if state.status is Status.RUNNING else self.waiting).remove(state)

    def unseated(self) -> Iterator[RequestState]:
        yield from self.parked
        yield from self.waiting

    def check_invariants(self) -> None:
        for line, status in ((self.waiting, Status.WAITING), (self.running, Status.RUNNING)):
            assert line == sorted(line, key=by_order)
            assert all(state.status is status for state in line)
        assert all(state.status is Status.PARKED for state in self.parked)


def last_of(states: Iterable[RequestState]) -> RequestState | None:
    """Return the last sequence in order: the first from which resources are taken back."""
    return max(states, key=by_order, default=None)
