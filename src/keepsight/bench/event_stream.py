"""Server-sent events out of the pieces that come off a socket.

Pure: bytes in, the data of events out.  A piece may end anywhere; most hold exactly one event.
"""

DONE = b"[DONE]"


class EventReader:
    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of all lines that are complete now; other fields and comments say nothing here."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [data for line in lines if line.startswith(b"data:") and (data := line[5:].strip())]
