"""Notices that a client has left while nothing is read from it: nobody reports it then, and it would be answered on."""

import asyncio
from typing import Any

from keepsight.frontend.http.tcp_info import has_left

SECONDS_BETWEEN_LOOKOUTS = 1.0
# What is read in search of the end of the connection.
MAX_WAITING_BYTES = 2**20


class Lookout(asyncio.Protocol):
    """A mixin before one of uvicorn's protocols, which pause reading while a request or much of a body waits."""

    # Attributes of uvicorn's protocol.
    transport: asyncio.Transport
    flow: Any
    cycle: Any
    conn: Any
    _next_look: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look_out()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        self._look_out()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._next_look is not None:
            self._next_look.cancel()

    @property
    def _answered(self) -> Any:
        """The request being answered; h11's protocol knows no other."""
        return self.cycle

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _look_out(self) -> None:
        if self._is_answering and self.flow.read_paused and self._next_look is None:
            event_loop = asyncio.get_running_loop()
            self._next_look = event_loop.call_later(SECONDS_BETWEEN_LOOKOUTS, self._end_if_client_left)

    def _end_if_client_left(self) -> None:
        self._next_look = None
        if self.transport.is_closing() or not self.flow.read_paused:
            return
        if has_left(self.transport.get_extra_info("socket")):
            self.transport.abort()
            return
        if self._count_waiting() < MAX_WAITING_BYTES:
            self.flow.resume_reading()  # the end comes behind all that was sent, for which the kernel may lack room
        self._look_out()

    def _count_waiting(self) -> int:
        """Return how many bytes were read that no app has asked for yet; with h11, which keeps what is not its turn."""
        return len(self.cycle.body) + len(self.conn.trailing_data[0])
