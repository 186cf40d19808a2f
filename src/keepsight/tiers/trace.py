"""A trace of cache accesses: a line of JSON for each use, with keys that reveal nothing of what they name.

Knows neither caches nor policies. Invariant: recording never blocks its caller; what cannot be written is left out and
counted, and the count is logged on closing.
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
    """One use of an entry: its key, its size, and the time it takes to compute."""

    time: float
    key: str
    num_bytes: int
    seconds: float


def read_trace(path: Path) -> Iterator[Access]:
    """Yield the uses of a trace, without a truncated last line. Raises InvalidArgumentError if the file is no trace."""
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
    """Appends to a file, on its own thread."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be written."""
        self.num_left_out = 0
        # Unbuffered, so that each line is one write: several engines may append to one file.
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
            logger.warning("%d uses are missing from the trace", self.num_left_out)

    def _write_all(self) -> None:
        encoder, has_warned, rest = msgspec.json.Encoder(), False, b""
        while (access := self._waiting.get()) is not None:
            # First the rest of a line that a full disk cut off: lines behind half a line could not be read.
            line = rest + encoder.encode(access) + b"\n"
            try:
                rest = line[self._file.write(line) :]
            except OSError as error:
                self.num_left_out += 1
                if not has_warned:
                    has_warned = True
                    logger.warning("the trace cannot be written: %s", error)
        self.num_left_out += rest.count(b"\n")
