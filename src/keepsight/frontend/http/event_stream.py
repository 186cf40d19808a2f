"""A streamed answer: server-sent events, which end at once when the client leaves."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keepsight.frontend.http.unless_client_leaves import unless_client_leaves

# For what stands between a stream and its client: nginx would gather events until its buffer is full.
_AS_IT_COMES = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(Response):
    """A stream that always closes its events: a client that leaves frees the engine at once, not on garbage collection.

    (Starlette's own stream takes four times as long to begin.)
    """

    def __init__(self, first: bytes, others: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=_AS_IT_COMES, media_type="text/event-stream")
        del self.headers["content-length"]  # unknown in advance
        self._first, self._others = first, others

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._others):
            with suppress(ClientDisconnect):
                await unless_client_leaves(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._others:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body"})
