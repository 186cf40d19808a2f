"""uvicorn, as a server on the open internet has to run it: nobody keeps a connection by being slow.

The headers of a request have their time and their size, and a client that does not read what it is sent is cut off: its
request then ends as that of any client that leaves.  (What a body may take is the business of who reads it.)
"""

import asyncio
import logging
from functools import partial
from typing import Any, ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from keepsight.api_settings import ApiSettings
from keepsight.frontend.accept_in_turn import ServerInTurn
from keepsight.frontend.direct_reader import Connection, DirectReader
from keepsight.frontend.read_body import COLLECT_BODY, Body

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES = 64 * 1024
# A body whose rest is as large is read directly, once so much of it has come that its length can be believed: whoever
# stalls holds no more than that many times what was sent.
MIN_DIRECT_BYTES = 256 * 1024
BELIEVED_RATIO = 32
HEADERS_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def make_server(app: ASGIApp, settings: ApiSettings) -> uvicorn.Server:
    protocol = type("Protocol", (_Impatient, AutoHTTPProtocol), {"patience_seconds": settings.slow_client_seconds})
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=settings.root_path,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
    )
    return ServerInTurn(config)


class _Deadline:
    """At most one is running; it cuts a connection off unless it is stopped."""

    def __init__(self, seconds: float, fault: str) -> None:
        self._seconds, self._fault = seconds, fault
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._cut_off, transport)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cut_off(self, transport: asyncio.Transport) -> None:
        logger.info("a client %s in %g s: its connection is closed", self._fault, self._seconds)
        transport.abort()


class _Impatient(Connection):
    """Before one of uvicorn's protocols, h11's or httptools': sees what comes, and when nobody reads."""

    patience_seconds: ClassVar[float]
    # Of uvicorn's protocol.
    transport: asyncio.Transport
    scope: dict[str, Any]
    cycle: Any
    flow: Any
    parser: Any
    # The one that is coming, if its reader was heard of, and what its headers say of its length.
    _body: Body | None = None
    _body_length = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_header_bytes = 0
        self._to_ask = _Deadline(self.patience_seconds, "sent no whole request")
        self._to_read = _Deadline(self.patience_seconds, "did not read its answer")
        self._to_ask.start(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(len(data))
        self._try_read_directly()

    def _watch(self, num_bytes: int) -> None:
        """After so many were received."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._num_header_bytes = 0
            self._to_ask.stop()
            return
        self._to_ask.start(self.transport)
        # What is left of a body that was refused is not counted.
        if self.cycle is None or not self.cycle.more_body:
            self._num_header_bytes += num_bytes
        if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(HEADERS_TOO_LARGE)
            self.transport.close()

    # httptools' alone calls these three: with h11 each piece of a body is passed on by itself.

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # type: ignore[misc]
        self._body_length = _length_of_body(self.scope["headers"])
        self.scope.setdefault("extensions", {})[COLLECT_BODY] = partial(self._collect_body, self.cycle)

    def on_body(self, body: bytes) -> None:
        if self._body is None:
            super().on_body(body)  # type: ignore[misc]
        elif not self.cycle.response_complete and not self._body.try_add(body):
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._body = None
        super().on_message_complete()  # type: ignore[misc]

    def _collect_body(self, cycle: Any, body: Body) -> None:
        if cycle is self.cycle and cycle.more_body and not cycle.disconnected:
            body.try_add(cycle.body)
            cycle.body = bytearray()
            cycle.message_event.clear()
            self._body = body
            self._try_read_directly()

    # Past the parser ------------------------------------------------------------------------------------------

    def _try_read_directly(self) -> None:
        body = self._body
        if body is None or self.transport.is_closing():
            return
        num_left = self._body_length - body.num_bytes
        is_believed = body.num_bytes * BELIEVED_RATIO >= self._body_length
        if num_left >= MIN_DIRECT_BYTES and is_believed and body.try_reserve(num_left):
            self._hand_reading_to(DirectReader(self, body, num_left))

    def note_progress(self) -> None:
        self._unset_keepalive_if_required()  # type: ignore[attr-defined]
        self._watch(0)

    def end_body(self) -> None:
        # The one that there is still waits for the body.
        self.parser = type(self.parser)(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.on_message_complete()
        self._hand_reading_to(self)

    def _hand_reading_to(self, protocol: asyncio.BaseProtocol) -> None:
        # Some transports look at who reads only when reading begins.
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._to_read.start(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._to_read.stop()

    def connection_lost(self, error: Exception | None) -> None:
        self._to_ask.stop()
        self._to_read.stop()
        super().connection_lost(error)


def _length_of_body(headers: list[tuple[bytes, bytes]]) -> int:
    """0 if it is not told."""
    lengths = [value for name, value in headers if name == b"content-length"]
    is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
    return int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() and not is_chunked else 0
