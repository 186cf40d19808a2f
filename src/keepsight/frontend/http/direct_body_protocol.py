"""A connection that writes large bodies directly to where they go, and answers pipelined requests in order."""

import asyncio
import sys
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import ref

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from keepsight.frontend.http.direct_reader import Connection, DirectReader
from keepsight.frontend.http.read_body import COLLECT_BODY, Body
from keepsight.frontend.http.slow_client_limits import (
    MAX_HEADER_BYTES,
    TOO_LONG,
    Deadline,
    SlowClientLimits,
    count_unread,
)

# Each header costs some hundred bytes and a microsecond or two, however short. Clients send ten, proxies add some.
MAX_HEADERS = 256
TOO_MANY = f"there are more than {MAX_HEADERS} headers"
# A body is read directly if at least MIN_DIRECT_BYTES are left, and once enough has arrived for its length to be
# believed: a client that stalls holds at most BELIEVED_RATIO times the memory of what it sent.
MIN_DIRECT_BYTES = 256 * 1024
BELIEVED_RATIO = 32
# Requests of one connection that wait for those before them: clients that pipeline at all send a few. A piece of
# PIECE_BYTES may hold some more.
MAX_PIPELINED = 32
PIECE_BYTES = 1024
END_OF_HEAD = b"\r\n\r\n"
# Of what a client still sends after the last answer: more than two of the largest bodies that the default allows. It
# may send on while it reads its answers.
MAX_DROPPED_BYTES = 2**28


class _HeldFlow(FlowControl):
    """Lets nobody resume reading while what was read has to wait."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class _AnswersTransport:
    """A transport as an answer uses it, which leaves the closing to the connection.

    The reference is weak: a cycle would keep the request until the next garbage collection.
    """

    def __init__(self, transport: asyncio.Transport, connection: "DirectBodyProtocol") -> None:
        self.write, self.is_closing, self._close = transport.write, transport.is_closing, transport.close
        self._connection = ref(connection)

    def close(self) -> None:
        connection = self._connection()
        (self._close if connection is None else connection.close_behind_answer)()


class DirectBodyProtocol(SlowClientLimits, Connection):
    """Writes bodies directly to their destination. (With h11 each piece is passed on separately.)"""

    recognizes_bodies = True
    # Attributes of uvicorn's protocol.
    scope: dict[str, Any]
    flow: _HeldFlow
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
    # The refusal that follows the answers to the requests before it; what comes behind it is dropped.
    _refusal: tuple[bytes, str] | None = None
    # After the last answer, while the client still sends.
    _is_lingering = False
    _num_dropped = 0
    # True once the server shuts down: nothing lingers then.
    _is_ending = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _HeldFlow(transport)
        self._to_linger = Deadline(self.patience_seconds, "went on sending", partial(count_unread, transport))
        # What is not parsed yet, as too many requests wait.
        self._unparsed = bytearray()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            self._drop(len(data))
            return
        if self._refusal is not None:
            return
        if self._unparsed or data.count(END_OF_HEAD) > MAX_PIPELINED:
            self._unparsed += data
            self._parse_in_pieces()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._received = data
        super().data_received(data)
        self._received = b""
        self._try_read_directly()

    def _parse_in_pieces(self) -> None:
        """Parse what came until enough requests wait."""
        self.flow.is_held = True
        while self._unparsed and len(self.pipeline) < MAX_PIPELINED and not self.transport.is_closing():
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            self._parse(piece)
        if self._unparsed:
            self.flow.pause_reading()
        else:
            self.flow.is_held = False
            self.flow.resume_reading()

    def _count_waiting(self) -> int:
        return len(self.cycle.body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed:
            self._parse_in_pieces()
        if self._refusal is not None and not self._is_answering:
            super()._refuse(*self._refusal)

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer in order: the requests before what is invalid come first."""
        if self._refusal is not None or self._is_lingering:
            return
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # it is itself invalid
        has_own = self._answered is self.cycle and self.cycle is not None and self.cycle.more_body
        if self._is_answering and not (has_own and not self.cycle.response_started):
            self._refusal = status, message
            self._unparsed.clear()
        else:
            super()._refuse(status, message)

    # The end of the connection -------------------------------------------------------------------------------

    def close_behind_answer(self) -> None:
        """Close the connection behind the last answer, or in the middle of one that failed."""
        is_early = self._answered.response_complete and self._answered.more_body
        (self._close if is_early else self.transport.close)()

    def _close(self) -> None:
        """Let the client read the answer: closing would reset the connection if anything of the request is unread.

        Some clients do not read before they have sent everything, and would not see why they were refused.
        """
        self._is_lingering, self._refusal = True, None
        self.pipeline.clear()
        self._unparsed.clear()
        self._abandon_answer()
        if self._is_ending:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            with suppress(OSError):  # what was just written may have found that the client left
                self.transport.write_eof()
        self.flow.is_held = False
        self.flow.resume_reading()
        self._to_ask.stop()
        self._to_linger.start(self.transport)

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_DROPPED_BYTES:
            self.transport.close()

    def _watch(self) -> None:
        if not self._is_lingering:
            super()._watch()

    def shutdown(self) -> None:
        self._is_ending = True
        if self._is_lingering:
            self.transport.close()
        else:
            super().shutdown()  # type: ignore[misc]

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._to_linger.stop()
        self._abandon_answer()  # uvicorn notifies only the latest request

    # Callbacks of httptools ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._has_headers = False
        super().on_message_begin()  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_headers:
            return
        if len(self.headers) == MAX_HEADERS:
            self.refuse_headers(TOO_MANY)
            raise OverflowError  # ends the parsing
        super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._has_headers = True
        # Headers that arrived together with what follows them are counted nowhere else.
        if _length_of_head(self.url, self.headers) > MAX_HEADER_BYTES:
            self.refuse_headers(TOO_LONG)
            raise OverflowError  # ends the parsing
        super().on_headers_complete()  # type: ignore[misc]
        if self.parser.should_upgrade():
            return
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
        cycle.transport = _AnswersTransport(self.transport, self)
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
        super(SlowClientLimits, self).data_received(self._received)  # already counted

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
        if body is None or self._unparsed or self.transport.is_closing():
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


def _length_of_head(url: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    """Return the size of URL and headers as sent, with `: ` and the end of each line."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def _length_of_body(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the length that the headers state, or 0 if they state none."""
    lengths = [value for name, value in headers if name == b"content-length"]
    is_chunked = any(name == b"transfer-encoding" for name, _ in headers)
    return int(lengths[0]) if len(lengths) == 1 and lengths[0].isdigit() and not is_chunked else 0
