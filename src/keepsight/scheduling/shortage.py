"""Who found too little of something that several take: what gets free is left to it by all behind it.

Else whoever needs less could take it for ever.  Knows nothing of what is short.
"""

from collections.abc import Callable

from keepsight.scheduling.request_state import EncoderTurn, Order, RequestState


class Shortage:
    def __init__(self, place_of: Callable[[RequestState], Order | EncoderTurn]) -> None:
        """`place_of`: in the order in which it is given out."""
        self._place_of = place_of
        self._short: RequestState | None = None

    def keeps_out(self, state: RequestState) -> bool:
        return self._short is not None and self._place_of(self._short) < self._place_of(state)

    def begin(self, state: RequestState) -> None:
        self._short = state

    def end(self, state: RequestState) -> None:
        """If it is its own: it has enough, needs nothing any more, or will look again."""
        if self._short is state:
            self._short = None
