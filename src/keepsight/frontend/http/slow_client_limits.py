"""Limits how slowly a client may send a request or read its answer, and how large its headers may be.

A client that exceeds them is cut off: its request then ends like that of any client that disconnects.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, cast

import msgspec

from keepsight.frontend.http.error_response import ErrorDetail, ErrorResponse
from keepsight.frontend.http.lookout import Lookout
from keepsight.frontend.http.read_body import MIN_BYTES_PER_SECOND
from keepsight.frontend.http.tcp_info import count_acknowledged, count_unacknowledged

logger = logging.getLogger(__name__)
MAX_HEADER_BYTES = 64 * 1024
TOO_LONG = f"the headers exceed {MAX_HEADER_BYTES} bytes"
# How often to look whether a client has read everything over TLS; once it has, how long to wait for it to end TLS.
SECONDS_BETWEEN_LOOKS = 0.5
# The most that the end of TLS, `close_notify`, takes when encrypted.
MAX_END_BYTES = 100


class Deadline:
    """Aborts a connection after a time, unless stopped, or unless enough of the bytes left were sent meanwhile.

    At most one timer runs at a time. While it does, nothing may be written, unless the kernel tells what was read:
    what is left would tell nothing.
    """

    def __init__(
        self,
        seconds: float,
        fault: str,
        count_left: Callable[[], int] = int,
        is_awaited: Callable[[asyncio.Transport], object] = lambda _: True,
    ) -> None:
        self._seconds, self._fault, self._count_left, self._is_awaited = seconds, fault, count_left, is_awaited
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        if self._timer is None:
            event_loop = asyncio.get_running_loop()
            self._timer = event_loop.call_later(self._seconds, self._end, transport, self._count_left())

    def restart(self, transport: asyncio.Transport) -> None:
        self.stop()
        self.start(transport)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, transport: asyncio.Transport, num_left: int) -> None:
        self._timer = None
        if not self._is_awaited(transport):
            return
        if num_left - self._count_left() >= MIN_BYTES_PER_SECOND * self._seconds:
            self.start(transport)
            return
        logger.info("a client %s in %g s: its connection is closed", self._fault, self._seconds)
        transport.abort()


class ClosingTransport:
    """A transport whose closing is limited, too, by how slowly the client reads: it waits until all is sent.

    Over TLS it waits for the client to end TLS, too. Many clients do not, so the connection is cut off once the client
    has read everything; until then it cannot be expected to.
    """

    def __init__(self, transport: asyncio.Transport, to_read: Deadline) -> None:
        self._transport, self._to_read = transport, to_read
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._next_look: asyncio.TimerHandle | None = None
        # If the kernel held nothing when it was closed: what the client had read.
        self._num_read_at_close: int | None = None
        self._is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_write_buffer_size(self) -> int:
        """Over TLS include what the kernel holds: only then the transport below may hold more, counted nowhere."""
        num_held = count_unacknowledged(self._connection) if self._is_tls else 0
        if self._is_end(num_held):
            return 0
        return self._transport.get_write_buffer_size() + num_held

    def close(self) -> None:
        """Start the limits even if the event loop has closed it already; uvicorn may close it after it is lost."""
        if self._is_lost:
            return
        if self._is_tls and self._next_look is None:
            if not self.get_write_buffer_size():
                self._num_read_at_close = count_acknowledged(self._connection)
            self._look_later()
        if not self._transport.is_closing():  # asyncio's own of TLS can be closed only once
            self._transport.close()
        self._to_read.start(cast(asyncio.Transport, self))

    def end(self) -> None:
        """Called once the connection is lost."""
        self._is_lost = True
        self._to_read.stop()
        if self._next_look is not None:
            self._next_look.cancel()

    def _is_end(self, num_held: int) -> bool:
        """Return whether what the kernel holds is only the end of TLS, which is not for the client to read.

        The kernel is also empty if the event loop was too busy to refill it: it is then given more after the closing.
        """
        if self._num_read_at_close is None:
            return False
        return count_acknowledged(self._connection) + num_held - self._num_read_at_close <= MAX_END_BYTES

    @property
    def _connection(self) -> Any:
        return self._transport.get_extra_info("socket")

    def _look_later(self) -> None:
        num_read, event_loop = count_acknowledged(self._connection), asyncio.get_running_loop()
        self._next_look = event_loop.call_later(SECONDS_BETWEEN_LOOKS, self._look, num_read)

    def _look(self, num_read_before: int) -> None:
        # If nothing was read in between, the kernel has not just become empty with more to come.
        if count_acknowledged(self._connection) == num_read_before and not self.get_write_buffer_size():
            self._transport.abort()
        else:
            self._to_read.start(cast(asyncio.Transport, self))  # it ends when the kernel is empty for a moment
            self._look_later()


class SlowClientLimits(Lookout):
    """A mixin before one of uvicorn's protocols, h11's or httptools': limits how slowly a client may send or read."""

    patience_seconds: ClassVar[float]
    on_refused: Callable[[], object]
    # True if received bytes that belong to a body are told apart from others.
    recognizes_bodies: ClassVar[bool] = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        unread, is_awaited = partial(count_unread, transport), methodcaller("get_write_buffer_size")
        self._to_read = Deadline(self.patience_seconds, "did not read its answer", unread, is_awaited)
        self._closing = ClosingTransport(transport, self._to_read)
        super().connection_made(cast(asyncio.Transport, self._closing))
        # Bytes received that belong to no body, since the last that did, or the end of a request.
        self._num_header_bytes = 0
        self._to_ask = Deadline(self.patience_seconds, "sent no complete request")
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
            if not self.flow.write_paused and not self.transport.is_closing():
                self._to_read.stop()  # its answer is about to be written
        else:
            self._to_ask.start(self.transport)
        if not self.recognizes_bodies and cycle is not None and (cycle.more_body or not cycle.response_complete):
            self._num_header_bytes = 0
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.refuse_headers(TOO_LONG)

    def refuse_headers(self, message: str) -> None:
        self._refuse(b"431 Request Header Fields Too Large", message)

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer something that is not even a request, and close; only once, as what follows is invalid too."""
        if self.transport.is_closing():
            return
        if not self.recognizes_bodies and self._is_answering and not self.cycle.more_body:
            # Behind the connection's last request h11 takes anything for invalid, even an empty line. It stays unread.
            self.flow.pause_reading()
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # a refusal within an answer would be taken for a part of it
            return
        self.on_refused()
        detail = ErrorDetail(message=message, type="invalid_request_error")
        body = msgspec.json.encode(ErrorResponse(error=detail))
        headers = b"content-type: application/json\r\nconnection: close\r\nx-request-id: %s\r\ncontent-length: %d" % (
            os.urandom(16).hex().encode(),
            len(body),
        )
        self.transport.write(b"HTTP/1.1 %s\r\n%s\r\n\r\n%s" % (status, headers, body))
        self._close()

    def _close(self) -> None:
        self._abandon_answer()
        self.transport.close()

    def _abandon_answer(self) -> None:
        """End it as if the client had left: what is written behind a refusal that waits would be sent, too."""
        if self._is_answering:
            self._answered.disconnected = True
            self._answered.waiting_for_100_continue = False
            self._answered.message_event.set()

    def on_response_complete(self) -> None:
        """Watch the end of an answer too: writing is not paused for it, and closing would wait for it without limit."""
        super().on_response_complete()
        self._watch_reading()

    def _watch_reading(self) -> None:
        is_last_written = self.transport.is_closing() or (self.cycle is not None and self.cycle.response_complete)
        if is_last_written and self.transport.get_write_buffer_size():
            self._to_read.restart(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._to_read.restart(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._to_read.stop()
        self._watch_reading()

    def eof_received(self) -> None:
        """Close, which starts its limits: by themselves, the event loops close without `ClosingTransport`."""
        super().eof_received()
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._to_ask.stop()
        self._closing.end()
        super().connection_lost(error)
        self._unset_keepalive_if_required()  # type: ignore[attr-defined]  # uvicorn leaves it after an error


def count_unread(transport: asyncio.Transport) -> int:
    """Return how many bytes the client has not read, or else, below zero, how many it has: the difference counts.

    The kernel takes more only once much of its buffer, which may be megabytes, was read; and TLS's transport does not
    count what its own transport holds.
    """
    connection = transport.get_extra_info("socket")
    if num_acknowledged := count_acknowledged(connection):
        return -num_acknowledged
    return transport.get_write_buffer_size() + count_unacknowledged(connection)
