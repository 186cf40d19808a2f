"""A record of what was asked for: a line of JSON for each use, with names that tell nothing of what they name.

Knows neither caches nor policies.  Invariant: recording never makes its caller wait; what cannot be written is left out
and counted, which is told when all is closed.
"""

import logging
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from keepsight.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

_MAX_WAITING = 10_000


class Access(msgspec.Struct, frozen=True, rename={"key": "hash", "num_bytes": "bytes"}):
    """One use of something: its name, its size, and what making it takes."""

    time: float
    key: str
    num_bytes: int
    seconds: float


def read_trace(path: Path) -> Iterator[Access]:
    """Raises InvalidArgumentError if it is none; a last line that was cut off is left out."""
    decoder = msgspec.json.Decoder(Access)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidArgumentError("trace", f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            access = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise InvalidArgumentError("trace", f"{path}, line {number}: {error}") from error
        if access.num_bytes < 0 or not access.seconds >= 0:
            raise InvalidArgumentError("trace", f"{path}, line {number}: neither bytes nor seconds may be negative")
        yield access


class TraceRecorder:
    """Adds to a file, by a thread of its own."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be written."""
        self.num_left_out = 0
        # Each line is one write: several engines may add to one file.
        self._file = path.open("ab", buffering=0)
        self._waiting: queue.Queue[Access | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="trace", daemon=True)
        self._thread.start()

    def record(self, access: Access) -> None:
        try:
            self._waiting.put_nowait(access)
        except queue.Full:
            self.num_left_out += 1

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()
        self._file.close()
        if self.num_left_out:
            logger.warning("%d uses are missing in the trace", self.num_left_out)

    def _write_all(self) -> None:
        encoder, has_warned, rest = msgspec.json.Encoder(), False, b""
        while (access := self._waiting.get()) is not None:
            # What a full disk took no more of comes first: behind half a line nobody could read the others.
            line = rest + encoder.encode(access) + b"\n"
            try:
                rest = line[self._file.write(line) :]
            except OSError as error:
                self.num_left_out += 1
                if not has_warned:
                    has_warned = True
                    logger.warning("the trace cannot be written: %s", error)
        self.num_left_out += rest.count(b"\n")
