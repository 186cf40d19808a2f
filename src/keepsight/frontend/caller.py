"""A caller that waits for the outputs of a request, and the connected engine that has the request.

Plain state: `engine_client.py` decides what happens to them, and guards them.
"""

import asyncio
from collections.abc import Callable

from keepsight.frontend.choose_engine import EngineView
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.requests import MediaDropped, MediaHeld, TiersChanged, TierStatus, ToEngine, TokenOutput

# Delivered to a caller: tokens as they come; an exception is always the last.
Outputs = list[TokenOutput | Exception]
OnOutputs = Callable[[Outputs], None]
# Returns False if the message will never be read.
Send = Callable[[ToEngine], bool]


class ConnectedEngine(EngineView):
    def __init__(self, send: Send, rank: int, *, accepts_unrequested_pixels: bool) -> None:
        super().__init__(rank, accepts_unrequested_pixels=accepts_unrequested_pixels)
        self.send = send
        self.tiers: tuple[TierStatus, ...] = ()

    def take_hint(self, hint: MediaHeld | MediaDropped | TiersChanged) -> None:
        match hint:
            case MediaHeld(media_hashes):
                self.hints.note_held(media_hashes)
            case MediaDropped(media_hashes):
                self.hints.note_dropped(media_hashes)
            case TiersChanged(tiers):
                self.tiers = tiers

    def promise_pictures(self, prepared: PreparedRequest) -> tuple[str, ...]:
        """Promise each picture with all its parts or not at all: parts asked for later would cost a second decoding."""
        pictures, request_id = prepared.group_by_picture(prepared.makeable_media), prepared.engine_request.request_id
        return tuple(each for parts in pictures for each in self.hints.promise(request_id, parts))


class Caller:
    def __init__(
        self, prepared: PreparedRequest, on_outputs: OnOutputs, event_loop: asyncio.AbstractEventLoop | None
    ) -> None:
        self.prepared, self.on_outputs, self.event_loop = prepared, on_outputs, event_loop
        self.request_id, self.account = prepared.engine_request.request_id, prepared.account
        params = prepared.engine_request.sampling_params
        self.unfinished = set(range(params.n))
        # The engine does not know stop strings: the reader finds the ends, and tells which tokens are of the answer.
        self.has_stop_strings = bool(params.stop)
        # With stop strings: the choices of which the reader has not read the end.
        self.unread = set(self.unfinished)
        # How the request ended for the engine.
        self.end_reason = ""
        # The engine that has the request; None: there is no engine.
        self.engine: ConnectedEngine | None = None
        self.has_begun = False
        # When the request lost its first engine.
        self.first_loss = float("inf")

    def send(self, message: ToEngine) -> None:
        """Send a message to the engine that has the request; without one there is nobody who needs it."""
        if (engine := self.engine) is not None:
            engine.send(message)
