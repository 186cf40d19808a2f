"""Reads the rest of a large body from its connection directly into its destination.

An HTTP parser is given copies of what was read, and passes on copies of these, which costs several times as much as
reading. This reader knows nothing of HTTP but how many bytes the body has left, and never reads beyond them.
"""

import asyncio

from keepsight.frontend.http.read_body import Body

# The size of a buffer for data that is no longer wanted.
_SCRATCH_BYTES = 2**16


class Connection(asyncio.Protocol):
    """The protocol that a `DirectReader` replaces for as long as it reads."""

    def note_progress(self) -> None:
        raise NotImplementedError

    def end_body(self) -> None:
        raise NotImplementedError


class DirectReader(asyncio.BufferedProtocol):
    def __init__(self, connection: Connection, body: Body, num_bytes: int) -> None:
        """`num_bytes` of the body are still to come, and are reserved in it."""
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
