"""The rest of a large body, read from its connection to where it shall lie.

A parser of HTTP is handed copies of what was read, and hands on copies of these: that costs several times what reading
does.  Knows nothing of HTTP but that so many bytes are the body's, and never reads one more.
"""

import asyncio

from keepsight.frontend.http.read_body import Body

# For what nobody wants any more.
_SCRATCH_BYTES = 2**16


class Connection(asyncio.Protocol):
    """Whose place is taken meanwhile."""

    def note_progress(self) -> None:
        raise NotImplementedError

    def end_body(self) -> None:
        raise NotImplementedError


class DirectReader(asyncio.BufferedProtocol):
    def __init__(self, connection: Connection, body: Body, num_bytes: int) -> None:
        """`num_bytes` are still to come, and reserved."""
        self._connection, self._body, self._num_left = connection, body, num_bytes

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body.free_part() or memoryview(bytearray(min(self._num_left, _SCRATCH_BYTES)))

    def buffer_updated(self, num_bytes: int) -> None:
        self._body.note_filled(num_bytes)
        self._num_left -= num_bytes
        self._connection.note_progress()
        if not self._num_left:
            self._connection.end_body()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)
