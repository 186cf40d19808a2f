"""uvicorn, hardened for the open internet: no client can hold a connection by being slow.

The headers of a request are limited in time and size, and a client that does not read its answer is cut off: its
request then ends like that of any client that disconnects.  (`read_body` limits bodies.)
"""

import asyncio
import fcntl
import logging
import os
import sys
import termios
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from keepsight.api_settings import ApiSettings
from keepsight.frontend.http.direct_reader import Connection, DirectReader
from keepsight.frontend.http.error_response import ErrorDetail, ErrorResponse
from keepsight.frontend.http.fair_accept import FairAcceptServer
from keepsight.frontend.http.read_body import COLLECT_BODY, MIN_BYTES_PER_SECOND, Body

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES = 64 * 1024
# Each header costs some hundred bytes and a microsecond or two, however short.  Clients send ten, proxies add some.
MAX_HEADERS = 256
TOO_LONG = f"the headers exceed {MAX_HEADER_BYTES} bytes"
TOO_MANY = f"there are more than {MAX_HEADERS} headers"
# A body is read directly if at least MIN_DIRECT_BYTES are left, and once enough has arrived for its length to be
# believed: a client that stalls holds at most BELIEVED_RATIO times the memory of what it sent.
MIN_DIRECT_BYTES = 256 * 1024
BELIEVED_RATIO = 32
# Requests of one connection that wait for those before them: clients that pipeline at all send a few.
MAX_PIPELINED = 32
# Clients keep an idle connection for 5 seconds to a minute, load balancers for a minute.  The side that sends requests
# has to close it, or a request meets a connection that was just closed, and is lost.  uvicorn's default of 5 seconds
# equals httpx's.
IDLE_SECONDS = 75
# Messages that asyncio (and uvloop) log for each write, from the sixth on, between a client's disconnect and their
# report of it: an answer with many choices writes more than five times.
SUPPRESSED_LOG_MESSAGES = frozenset({"SSL connection is closed", "socket.send() raised exception."})


def make_server(app: ASGIApp, settings: ApiSettings, on_refused: Callable[[], object] = bool) -> FairAcceptServer:
    """Create the server.  `on_refused` is called for each 4xx that the app does not see."""
    logging.getLogger("asyncio").addFilter(_is_not_suppressed)
    base = _DirectBodyProtocol if hasattr(AutoHTTPProtocol, "on_body") else _SlowClientLimits
    terms = {"patience_seconds": settings.slow_client_seconds, "on_refused": staticmethod(on_refused)}
    protocol = type("Protocol", (base, AutoHTTPProtocol), terms)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        root_path=settings.root_path,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
    )
    server = FairAcceptServer(config)
    server.handshake_seconds = settings.slow_client_seconds
    return server


def _is_not_suppressed(record: logging.LogRecord) -> bool:
    return record.msg not in SUPPRESSED_LOG_MESSAGES


class _Deadline:
    """Aborts a connection after a time, unless stopped, or unless enough of the bytes left were sent meanwhile.

    At most one timer runs at a time.
    """

    def __init__(self, seconds: float, fault: str, count_left: Callable[[], int] = int) -> None:
        self._seconds, self._fault, self._count_left = seconds, fault, count_left
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        if self._timer is None:
            event_loop = asyncio.get_running_loop()
            self._timer = event_loop.call_later(self._seconds, self._end, transport, self._count_left())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, transport: asyncio.Transport, num_left: int) -> None:
        self._timer = None
        if num_left - self._count_left() >= MIN_BYTES_PER_SECOND * self._seconds:
            self.start(transport)
            return
        logger.info("a client %s in %g s: its connection is closed", self._fault, self._seconds)
        transport.abort()


class _SlowClientLimits(asyncio.Protocol):
    """A mixin before one of uvicorn's protocols, h11's or httptools': limits how slowly a client may send or read."""

    patience_seconds: ClassVar[float]
    on_refused: Callable[[], object]
    # True if received bytes that belong to a body are told apart from others.
    recognizes_bodies: ClassVar[bool] = False
    # Attributes of uvicorn's protocol.
    transport: asyncio.Transport
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Bytes received that belong to no body, since the last that did, or the end of a request.
        self._num_header_bytes = 0
        self._to_ask = _Deadline(self.patience_seconds, "sent no complete request")
        self._to_read = _Deadline(self.patience_seconds, "did not read its answer", partial(_count_unread, transport))
        self._to_ask.start(transport)

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data)
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """Update the deadline and check the size of the headers after something was received."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._to_ask.stop()
        else:
            self._to_ask.start(self.transport)
        if not self.recognizes_bodies and cycle is not None and (cycle.more_body or not cycle.response_complete):
            self._num_header_bytes = 0
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers(TOO_LONG)

    def _refuse_headers(self, message: str) -> None:
        self._refuse(b"431 Request Header Fields Too Large", message)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer something that is not even a request, and close; only once, as what follows is invalid too."""
        if self.transport.is_closing():
            return
        self.on_refused()
        detail = ErrorDetail(message=message, type="invalid_request_error")
        body = msgspec.json.encode(ErrorResponse(error=detail))
        headers = b"content-type: application/json\r\nconnection: close\r\nx-request-id: %s\r\ncontent-length: %d" % (
            os.urandom(16).hex().encode(),
            len(body),
        )
        self.transport.write(b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, headers, body))
        self.transport.close()

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


class _DirectBodyProtocol(_SlowClientLimits, Connection):
    """Writes bodies directly to their destination.  (With h11 each piece is passed on separately.)"""

    recognizes_bodies = True
    # Attributes of uvicorn's protocol.
    scope: dict[str, Any]
    flow: Any
    parser: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    pipeline: Any
    # The body being received, if a reader has asked for it, and its length according to the headers.
    _body: Body | None = None
    _body_length = 0
    # The request being answered.
    _answered: Any = None
    # True once the headers are complete: later ones, after a body, are trailers and not part of them.
    _has_headers = False
    _received = b""

    def data_received(self, data: bytes) -> None:
        self._received = data
        super().data_received(data)
        self._received = b""
        self._try_read_directly()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        # uvicorn notifies only the latest request.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    # Callbacks of httptools ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._has_headers = False
        super().on_message_begin()  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_headers:
            return
        if len(self.headers) == MAX_HEADERS:
            self._refuse_headers(TOO_MANY)
            raise OverflowError  # ends the parsing
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._has_headers = True
        # Headers that arrived together with what follows them are counted nowhere else.
        if _length_of_head(self.url, self.headers) > MAX_HEADER_BYTES:
            self._refuse_headers(TOO_LONG)
            raise OverflowError  # ends the parsing
        super().on_headers_complete()  # type: ignore[misc]
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) > MAX_PIPELINED:
            raise OverflowError  # ends the parsing
        if self.pipeline:
            # uvicorn stops reading while a request waits, and would not notice that the client disconnects.
            self.flow.resume_reading()
        self._body_length = _length_of_body(self.scope["headers"])
        self.scope.setdefault("extensions", {})[COLLECT_BODY] = partial(self._collect_body, self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        if self._body is None:
            super().on_body(body)  # type: ignore[misc]
        elif not self.cycle.response_complete and not self._body.try_add(body):
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._body, self._num_header_bytes = None, 0
        super().on_message_complete()  # type: ignore[misc]

    def _start_asgi_task(self, cycle: Any, app: ASGIApp) -> None:
        self._answered = cycle
        knows_chunks = cycle.scope["http_version"] != "1.0"
        super()._start_asgi_task(cycle, app if knows_chunks else _without_chunks(app, cycle))  # type: ignore[misc]

    def _should_upgrade(self) -> bool:
        """Called if the client asks for another protocol; on True uvicorn does not start the request yet."""
        return True

    def handle_websocket_upgrade(self) -> None:
        """Ignore an upgrade to any protocol, as a server may: some clients always ask for one.

        The parser takes all that follows for the other protocol, even a body, so it is parsed anew without the upgrade.
        """
        wish = sys.exception()
        assert wish is not None
        if self.scope["method"] == "CONNECT":
            self.send_400_response("this server is not a proxy")
            return
        request_line = f"{self.scope['method']} ".encode() + self.url + f" HTTP/{self.scope['http_version']}".encode()
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._renew_parser()
        self._received = b"\r\n".join([request_line, *headers, b"", self._received[wish.args[0] :]])
        super(_SlowClientLimits, self).data_received(self._received)  # already counted

    def _collect_body(self, cycle: Any, body: Body) -> bool:
        if cycle is not self.cycle or not cycle.more_body or cycle.disconnected:
            return False
        body.try_add(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        self._body = body
        self._try_read_directly()
        return True

    # Bypassing the parser -------------------------------------------------------------------------------------

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
        self._watch()

    def end_body(self) -> None:
        self._renew_parser()  # the current one still waits for the body
        self.on_message_complete()
        self._hand_reading_to(self)

    def _renew_parser(self) -> None:
        self.parser = type(self.parser)(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _hand_reading_to(self, protocol: asyncio.BaseProtocol) -> None:
        # Some transports look up their protocol only when reading begins.
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


def _without_chunks(app: ASGIApp, cycle: Any) -> ASGIApp:
    """Wrap `app` for a client of HTTP/1.0, to which uvicorn would send chunks.

    For such a client a body without a length ends with its connection.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                # uvicorn compares this with the body that it is given.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run


def _count_unread(transport: asyncio.Transport) -> int:
    """Return how many bytes of the answer the client has not read.

    The kernel takes more only once much of its buffer, which may be megabytes, was read.
    """
    connection = transport.get_extra_info("socket")
    num_taken = int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return transport.get_write_buffer_size() + num_taken


def _length_of_head(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    """Return the size of URL and headers as sent, with `: ` and the end of each line."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def _length_of_body(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the length that the headers state, or 0 if they state none."""
    lengths = [value for name, value in headers if name == b"content-length"]
    is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
    return int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() and not is_chunked else 0
