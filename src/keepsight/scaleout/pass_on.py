"""Passes an answer on to the client, each piece as it comes. The next is read only once the client has room for this.

An answer that breaks off never gets a regular end, which the client would take for that of the answer; but an event
stream ends with the error that a server sends if its engine is lost.
"""

import logging
from contextlib import aclosing

import msgspec
from starlette.types import Message, Scope, Send

from keepsight.errors import EngineLostError, ReplicaLostError
from keepsight.frontend.http.error_response import ErrorResponse, MessagesError, asks_anthropic
from keepsight.scaleout.replica import Answer, Headers, WholeAnswer

logger = logging.getLogger(__name__)
# The headers of one connection, not of what it carries. (https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1)
_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"transfer-encoding upgrade".split()
)
LOST = "the server that was answering was lost"


def keep_end_to_end(headers: Headers) -> Headers:
    """Return the headers without those that are meant for the connection alone; names in lower case.

    White space around a value is no part of it. (https://www.rfc-editor.org/rfc/rfc9110#section-5.5)
    """
    headers = [(name.lower(), value.strip(b" \t")) for name, value in headers]
    named = {each.strip().lower() for name, value in headers if name == b"connection" for each in value.split(b",")}
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]


async def pass_on(answer: Answer | WholeAnswer, scope: Scope, send: Send) -> None:
    headers = _keep_headers(answer)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    events = _EventCount() if _is_event_stream(headers) else None
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                if events is not None:
                    events.note(piece)
                await send(_body(piece))
    except ReplicaLostError as lost:
        logger.warning("an answer broke off: %s", lost)
        if events is None or not events.is_between:
            return  # without an end, on which the HTTP server closes the connection
        await send(_body(_write_error(scope, events.count)))
    await send({"type": "http.response.body"})


def _keep_headers(answer: Answer | WholeAnswer) -> Headers:
    dropped = {b"date"}  # the HTTP server has its own
    # Which does not count where there are chunks, nor where there is no body.
    if answer.status in (204, 304) or any(name.lower() == b"transfer-encoding" for name, _ in answer.headers):
        dropped.add(b"content-length")
    return [each for each in keep_end_to_end(answer.headers) if each[0] not in dropped]


def _body(piece: bytes) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": True}


def _is_event_stream(headers: Headers) -> bool:
    named = dict(headers)
    is_plain = b"content-encoding" not in named and b"content-length" not in named
    return is_plain and named.get(b"content-type", b"").startswith(b"text/event-stream")


class _EventCount:
    """How many events have passed, and whether the last of them is complete."""

    def __init__(self) -> None:
        self.count, self.is_between = 0, True
        self._last = b""

    def note(self, piece: bytes) -> None:
        seen = self._last + piece
        self.count += seen.count(b"\n\n")
        self.is_between, self._last = seen.endswith(b"\n\n"), seen[-1:]


def _write_error(scope: Scope, num_events: int) -> bytes:
    """Return the event, in the form of the API that was called, and what ends its streams."""
    error = EngineLostError(LOST, had_begun=True)
    if asks_anthropic(scope):
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(MessagesError.of(error))
    detail = ErrorResponse.of(error).error
    if scope["path"].endswith("/responses"):
        event = {"type": "error", "code": detail.code, "message": detail.message, "param": None}
        return b"event: error\ndata: %s\n\n" % msgspec.json.encode(event | {"sequence_number": num_events})
    return b"data: %s\n\ndata: [DONE]\n\n" % msgspec.json.encode(ErrorResponse(error=detail))
