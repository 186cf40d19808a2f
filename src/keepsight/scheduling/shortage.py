"""Who found too little of something that several take: what gets free is left to it by all behind it.

Else whoever needs less could take it for ever.  Knows nothing of what is short.
"""

from keepsight.scheduling.request_state import RequestState


class Shortage:
    def __init__(self) -> None:
        self._short: RequestState | None = None

    def keeps_out(self, state: RequestState) -> bool:
        return self._short is not None and self._short.order < state.order

    def begin(self, state: RequestState) -> None:
        self._short = state

    def end(self, state: RequestState) -> None:
        """If it is its own: it has enough, needs nothing any more, or will look again."""
        if self._short is state:
            self._short = None
