"""The log of all processes of a server: standard error, whose reader cannot stop the server.

A pipe or a terminal that nobody reads is soon full, and whoever writes to it then waits for the reader. Invariant: only
the first line without room waits, and not for long; those after it are left out, and counted, until there is room.
"""

import logging
import os
import select
import stat
import sys
from contextlib import suppress

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Longer than a reader takes that is only slow.
PATIENCE_SECONDS = 1.0


def begin_log() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[LeavingOut(open_without_waiting(2))])


class LeavingOut(logging.Handler):
    """Writes each line before it returns, not on another thread: the process may end at any time."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._num_left_out = descriptor, 0
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note = f"({self._num_left_out} lines were left out, as nobody read them)\n" if self._num_left_out else ""
            line = f"{note}{self.format(record)}\n".encode(self._encoding, "backslashreplace")
            self._num_left_out = 0 if self._try_write(line) else self._num_left_out + 1
        except Exception:
            self.handleError(record)

    def _try_write(self, line: bytes) -> bool:
        while line:
            if not self._poll.poll(0 if self._num_left_out else PATIENCE_SECONDS * 1000):
                return False
            try:
                # A pipe that has room has it for this much.
                line = line[os.write(self._descriptor, line[: select.PIPE_BUF]) :]
            except BlockingIOError:  # another process was faster
                return False
        return True


def open_without_waiting(descriptor: int) -> int:
    """Open a pipe or a terminal anew, so that no write waits: others share `descriptor`, and may want to wait.

    Return `descriptor` itself if that fails, or for a socket, as systemd's journal has: it has room for many lines or
    for none.
    """
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind):
        with suppress(OSError):  # it is another user's, or there is no /proc
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor
