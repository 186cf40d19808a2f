"""Parses server-sent events, from their lines or from the pieces read from a socket.

Does no I/O: bytes in, the data of events out. A piece may end anywhere; most hold exactly one event.
"""

DONE = b"[DONE]"


def data_of(line: bytes) -> bytes:
    """Return a line's data; nothing for other fields and comments."""
    return line[5:].strip() if line.startswith(b"data:") else b""


class EventReader:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of all lines that are now complete."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [data for line in lines if (data := data_of(line))]
