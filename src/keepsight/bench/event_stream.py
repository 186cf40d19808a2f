"""Parses server-sent events from the pieces read from a socket.

Does no I/O: bytes in, the data of events out.  A piece may end anywhere; most hold exactly one event.
"""

DONE = b"[DONE]"


class EventReader:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of all lines that are now complete; other fields and comments are ignored."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [data for line in lines if line.startswith(b"data:") and (data := line[5:].strip())]
