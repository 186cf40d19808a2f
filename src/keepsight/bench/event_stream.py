"""Parses server-sent events, from their lines or from the pieces read from a socket.

Does no I/O: bytes in, the data of events out. A piece may end anywhere; most hold exactly one event.
"""

from keepsight.bench.read_refusal import read_failure
from keepsight.errors import NoAnswerError

DONE = b"[DONE]"


class LineReader:
    def __init__(self) -> None:
        self._type = b""

    def data_of(self, line: bytes) -> bytes:
        """Return a line's data; nothing for other fields and comments. Raises NoAnswerError in an event of an error."""
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if self._type == b"error":
                raise NoAnswerError(read_failure(data))
            return data
        if line.startswith(b"event:"):
            self._type = line[6:].strip()
        elif line.startswith(b"error:"):  # a field of llama.cpp's
            raise NoAnswerError(read_failure(line[6:].strip()))
        elif not line.strip():  # the event's end
            self._type = b""
        return b""


class EventReader:
    def __init__(self) -> None:
        self._rest, self._lines = b"", LineReader()

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of all lines that are now complete. Raises NoAnswerError for an event of an error."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [data for line in lines if (data := self._lines.data_of(line))]
