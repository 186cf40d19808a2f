"""Routes outputs to the frontends that made the requests.

Knows neither sockets nor what is computed. Invariants: a request has a route from its arrival until its last output is
sent, its client leaves, or its frontend is lost; a question, until it is answered or its frontend is lost. A frontend
only gets outputs of what it asked since it came; and hints, among them that a reset is done.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from keepsight.engine.inbox import Inbox
from keepsight.engine.unanswered import Unanswered
from keepsight.requests import (
    AbortRequest,
    CachesReset,
    EngineRequest,
    FindMedia,
    FromEngine,
    MediaDropped,
    MediaFound,
    MediaHeld,
    MediaNeeded,
    Received,
    RequestBegun,
    RequestFailed,
    ResetCaches,
    TiersChanged,
    TokenOutput,
)

# Outputs for the one frontend that asked; all others are hints for every frontend.
ForOne = TokenOutput | RequestBegun | MediaNeeded | MediaFound | CachesReset | RequestFailed


class Frontends(Protocol):
    """The connected frontends. Sending never waits for any of them."""

    def send(self, frontend_id: str, outputs: Sequence[FromEngine]) -> bool: ...

    def send_to_all(self, outputs: Sequence[FromEngine]) -> object: ...

    def forget(self, frontend_id: str) -> None: ...


class OutputRouter:
    """Connects an inbox and the frontends; used from the threads of both."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        # Also held while putting and sending: a lost frontend may reconnect at once, with the same requests.
        self._lock = threading.Lock()
        self._routes: dict[str, str] = {}
        # By the id of each unanswered question: who asked it.
        self._askers: dict[str, str] = {}
        self._unanswered = Unanswered()
        # Requests of lost frontends, whose aborts the engine may not have read yet.
        self._lost: set[str] = set()
        # Those of them that were made again before it had: its outputs may still belong to the first request.
        self._resubmitted: dict[str, EngineRequest] = {}

    def take(self, frontend_id: str, message: Received) -> str | None:
        """Put a message into the inbox. Return why the engine will not see it; None if it will."""
        with self._lock:
            refusal = self._refuse(frontend_id, message)
            if refusal is None:
                self._note_asked(frontend_id, message)
                if not self._inbox.try_put(message):
                    return "the engine has ended"
        return refusal

    def send(self, outputs: Sequence[FromEngine], frontends: Frontends) -> None:
        by_frontend: defaultdict[str, list[FromEngine]] = defaultdict(list)
        hints: list[FromEngine] = []
        with self._lock:
            for output in outputs:
                if isinstance(output, CachesReset):
                    # The others free what was cleared. The answer to the asker, which may not be lost, is sent first.
                    hints.append(output)
                if isinstance(output, MediaHeld | MediaDropped | TiersChanged):
                    hints.append(output)
                elif (recipient := self._take_recipient(output)) is not None:
                    by_frontend[recipient].append(output)
            for frontend_id, its in by_frontend.items():
                if not frontends.send(frontend_id, its):
                    # Better to send no more tokens than to leave a gap.
                    frontends.forget(frontend_id)
                    self._forget(frontend_id)
        if hints:
            # Losing hints only costs round trips.
            frontends.send_to_all(hints)

    def lose(self, frontend_id: str) -> None:
        """Abort a lost frontend's requests, as nobody is left to read their answers. It may come again."""
        with self._lock:
            self._forget(frontend_id)

    def check_invariants(self) -> None:
        with self._lock:
            assert set(self._routes) == set(self._unanswered)
            assert set(self._resubmitted) <= set(self._routes)

    def _forget(self, frontend_id: str) -> None:
        self._askers = {query_id: asker for query_id, asker in self._askers.items() if asker != frontend_id}
        self._lost = {request_id for request_id in self._lost if self._inbox.holds(AbortRequest(request_id))}
        for request_id in [request_id for request_id, its in self._routes.items() if its == frontend_id]:
            self._note_asked(frontend_id, AbortRequest(request_id))
            self._inbox.try_put(AbortRequest(request_id))
            self._lost.add(request_id)

    def _take_recipient(self, output: ForOne) -> str | None:
        """Return who gets the output, and note that it is answered; None: nobody is left who asked for it."""
        if isinstance(output, MediaFound | CachesReset):
            return self._askers.pop(output.query_id, None)
        frontend_id = self._find_route(output.request_id)
        if frontend_id is not None:
            self._unanswered.note_answered(output)
            self._drop_ended(output.request_id)
        return frontend_id

    def _find_route(self, request_id: str) -> str | None:
        if (again := self._resubmitted.get(request_id)) is not None:
            if self._inbox.holds(again):
                return None
            del self._resubmitted[request_id]
        return self._routes.get(request_id)

    def _refuse(self, frontend_id: str, message: Received) -> str | None:
        """Return why a message is refused, if it is: no frontend may touch another's requests."""
        match message:
            case EngineRequest(request_id) if request_id in self._routes:
                return f"request {request_id!r} exists already"
            case AbortRequest(request_id) if self._routes.get(request_id) != frontend_id:
                return f"there is no request {request_id!r}"
            case FindMedia(query_id) | ResetCaches(query_id) if query_id in self._askers:
                return f"question {query_id!r} exists already"
        return None

    def _note_asked(self, frontend_id: str, message: Received) -> None:
        self._unanswered.note_asked(message)
        match message:
            case EngineRequest(request_id):
                self._routes[request_id] = frontend_id
                if request_id in self._lost and self._inbox.holds(AbortRequest(request_id)):
                    self._resubmitted[request_id] = message
            case AbortRequest(request_id):
                self._drop_ended(request_id)
            case FindMedia(query_id) | ResetCaches(query_id):
                self._askers[query_id] = frontend_id

    def _drop_ended(self, request_id: str) -> None:
        if request_id not in self._unanswered:
            self._routes.pop(request_id, None)
            self._resubmitted.pop(request_id, None)
