"""uvicorn, as a server on the open internet has to run it: nobody keeps a connection by being slow.

The headers of a request have their time and their size, and a client that does not read what it is sent is cut off: its
request then ends as that of any client that leaves.  (What a body may take is the business of who reads it.)
"""

import asyncio
import fcntl
import logging
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
from keepsight.frontend.http.accept_in_turn import ServerInTurn
from keepsight.frontend.http.direct_reader import Connection, DirectReader
from keepsight.frontend.http.error_response import ErrorDetail, ErrorResponse
from keepsight.frontend.http.read_body import COLLECT_BODY, MIN_BYTES_PER_SECOND, Body

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES = 64 * 1024
# Each costs some hundred bytes and a microsecond or two, however short it is.  Clients send ten, proxies add some.
MAX_HEADERS = 256
TOO_LONG = f"the headers exceed {MAX_HEADER_BYTES} bytes"
TOO_MANY = f"there are more than {MAX_HEADERS} headers"
# A body whose rest is as large is read directly, once so much of it has come that its length can be believed: whoever
# stalls holds no more than that many times what was sent.
MIN_DIRECT_BYTES = 256 * 1024
BELIEVED_RATIO = 32
# Requests of one connection that wait for those before them: clients that do so at all send a few.
MAX_PIPELINED = 32
# Clients keep an idle connection for 5 seconds to a minute, load balancers for a minute; whoever closes it has to be
# the one that asks, or a request meets a connection that was closed just now, and is lost.  uvicorn's 5 seconds are
# httpx's.
IDLE_SECONDS = 75
# What asyncio (and uvloop) log of each piece that is written between a client's leaving and their telling of it, from
# the sixth on: an answer with many choices has more.
UNHEARD = frozenset({"SSL connection is closed", "socket.send() raised exception."})


def make_server(app: ASGIApp, settings: ApiSettings, on_refused: Callable[[], object] = bool) -> ServerInTurn:
    """`on_refused` hears of each 4xx that the app does not know of."""
    logging.getLogger("asyncio").addFilter(_is_heard)
    base = _PastHttptools if hasattr(AutoHTTPProtocol, "on_body") else _Impatient
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
    return ServerInTurn(config)


def _is_heard(record: logging.LogRecord) -> bool:
    return record.msg not in UNHEARD


class _Deadline:
    """At most one is running; it cuts a connection off unless it is stopped, or bytes that are left go meanwhile."""

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


class _Impatient(asyncio.Protocol):
    """Before one of uvicorn's protocols, h11's or httptools': sees what comes, and when nobody reads."""

    patience_seconds: ClassVar[float]
    on_refused: Callable[[], object]
    # Whether it is seen what of all that comes is of a body.
    tells_bodies: ClassVar[bool] = False
    # Of uvicorn's protocol.
    transport: asyncio.Transport
    cycle: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Of what is no body, since the last that was, or the end of a request.
        self._num_header_bytes = 0
        self._to_ask = _Deadline(self.patience_seconds, "sent no whole request")
        self._to_read = _Deadline(self.patience_seconds, "did not read its answer", partial(_count_unread, transport))
        self._to_ask.start(transport)

    def data_received(self, data: bytes) -> None:
        self._num_header_bytes += len(data)
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        """After something was received."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._to_ask.stop()
        else:
            self._to_ask.start(self.transport)
        if not self.tells_bodies and cycle is not None and (cycle.more_body or not cycle.response_complete):
            self._num_header_bytes = 0
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse_headers(TOO_LONG)

    def _refuse_headers(self, message: str) -> None:
        self._refuse(b"431 Request Header Fields Too Large", message)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, message: str) -> None:
        """What is not even a request.  Once: what follows of it is nothing either."""
        if self.transport.is_closing():
            return
        self.on_refused()
        detail = ErrorDetail(message=message, type="invalid_request_error")
        body = msgspec.json.encode(ErrorResponse(error=detail))
        headers = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d" % len(body)
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


class _PastHttptools(_Impatient, Connection):
    """Bodies are put where they shall lie.  (With h11 each piece is passed on by itself.)"""

    tells_bodies = True
    # Of uvicorn's protocol.
    scope: dict[str, Any]
    flow: Any
    parser: Any
    url: bytes
    headers: list[tuple[bytes, bytes]]
    pipeline: Any
    # The body that is coming, if its reader was heard of, and what its headers say of its length.
    _body: Body | None = None
    _body_length = 0
    # The request that is being answered.
    _answered: Any = None
    # Those that come later, behind a body, are none of the request's.
    _has_headers = False
    _received = b""

    def data_received(self, data: bytes) -> None:
        self._received = data
        super().data_received(data)
        self._received = b""
        self._try_read_directly()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        # uvicorn tells only the last that was asked.
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    # What httptools tells --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._has_headers = False
        super().on_message_begin()  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_headers:
            return
        if len(self.headers) == MAX_HEADERS:
            self._refuse_headers(TOO_MANY)
            raise OverflowError  # which ends the parsing
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._has_headers = True
        # Those that came at once with what follows them are counted by nobody else.
        if _length_of_head(self.url, self.headers) > MAX_HEADER_BYTES:
            self._refuse_headers(TOO_LONG)
            raise OverflowError  # which ends the parsing
        super().on_headers_complete()  # type: ignore[misc]
        if self.parser.should_upgrade():
            return
        if len(self.pipeline) > MAX_PIPELINED:
            raise OverflowError  # which ends the parsing
        if self.pipeline:
            # uvicorn reads no more while one waits, and would not notice that the client leaves.
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
        """Asked if the client would rather speak something else: then uvicorn makes no request of it yet."""
        return True

    def handle_websocket_upgrade(self) -> None:
        """To whatever it is.  Nobody has to, so it is as if it were not asked for: some clients always do.

        The parser takes what follows for that protocol, even if it is a body.
        """
        wish = sys.exception()
        assert wish is not None
        if self.scope["method"] == "CONNECT":
            self.send_400_response("this is no proxy")
            return
        asked = f"{self.scope['method']} ".encode() + self.url + f" HTTP/{self.scope['http_version']}".encode()
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._renew_parser()
        self._received = b"\r\n".join([asked, *headers, b"", self._received[wish.args[0] :]])
        super(_Impatient, self).data_received(self._received)  # which is counted already

    def _collect_body(self, cycle: Any, body: Body) -> bool:
        if cycle is not self.cycle or not cycle.more_body or cycle.disconnected:
            return False
        body.try_add(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        self._body = body
        self._try_read_directly()
        return True

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
        self._watch()

    def end_body(self) -> None:
        self._renew_parser()  # the one that there is still waits for the body
        self.on_message_complete()
        self._hand_reading_to(self)

    def _renew_parser(self) -> None:
        self.parser = type(self.parser)(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _hand_reading_to(self, protocol: asyncio.BaseProtocol) -> None:
        # Some transports look at who reads only when reading begins.
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


def _without_chunks(app: ASGIApp, cycle: Any) -> ASGIApp:
    """uvicorn would send chunks to whoever knows none: what has no length ends with its connection there."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                # Which it compares with what it is given.
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run


def _count_unread(transport: asyncio.Transport) -> int:
    """Bytes.  The system takes more only once much of what it has, which may be megabytes, was read."""
    connection = transport.get_extra_info("socket")
    num_taken = int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return transport.get_write_buffer_size() + num_taken


def _length_of_head(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    """As they were sent, with `: ` and the end of a line."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def _length_of_body(headers: list[tuple[bytes, bytes]]) -> int:
    """0 if it is not told."""
    lengths = [value for name, value in headers if name == b"content-length"]
    is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
    return int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() and not is_chunked else 0
