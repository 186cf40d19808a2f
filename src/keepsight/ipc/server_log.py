"""The log of all processes of a server: standard error, whose reader cannot stop the server.

A pipe or a terminal that nobody reads is soon full, and whoever writes to it then waits for the reader. Invariant: the
lines of a process wait for at most a second a minute. One that still has no room is left out and counted, as are those
after it until there is room, without a wait.
"""

import logging
import os
import select
import stat
import sys
from contextlib import suppress
from time import monotonic

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# How long lines wait in all before the patience is renewed: a reader that is slow only at times gets all.
PATIENCE_SECONDS, RENEWAL_SECONDS = 1.0, 60.0
# A socket with room has it for this much, and a default pipe holds no more. Longer than any usual line, which is thus
# written at once: in a file or a socket no other process's line gets into it.
MAX_WRITE_BYTES = 2**16


def begin_log() -> None:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[LeavingOut(open_without_waiting(2))])


class LeavingOut(logging.Handler):
    """Writes each line before it returns, not on another thread: the process may end at any time."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor, self._num_left_out, self._is_inside_line = descriptor, 0, False
        self._waited_seconds, self._renewed_at = 0.0, monotonic()
        # A pipe that could not be opened anew: if it has room, it has it for this much.
        is_small = os.get_blocking(descriptor) and is_pipe_or_terminal(descriptor)
        self._max_write_bytes = select.PIPE_BUF if is_small else MAX_WRITE_BYTES
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note = f"({self._num_left_out} lines were left out, as nobody read them)\n" if self._num_left_out else ""
            begin = "\n" if self._is_inside_line else ""
            line = f"{begin}{note}{self.format(record)}\n".encode(self._encoding, "backslashreplace")
            num_written = self._write(line)
            if num_written:
                self._is_inside_line = not line[:num_written].endswith(b"\n")
            self._num_left_out = 0 if num_written == len(line) else self._num_left_out + 1
        except Exception:
            self.handleError(record)

    def _write(self, line: bytes) -> int:
        """Return how many bytes there was room for."""
        num_written = 0
        while num_written < len(line) and self._has_room():
            try:
                num_written += os.write(self._descriptor, line[num_written:][: self._max_write_bytes])
            except BlockingIOError:  # another process was faster
                break
        return num_written

    def _has_room(self) -> bool:
        if self._poll.poll(0):
            return True
        if self._num_left_out:
            return False
        began = monotonic()
        if began - self._renewed_at > RENEWAL_SECONDS:
            self._waited_seconds, self._renewed_at = 0.0, began
        has_room = bool(self._poll.poll(max(PATIENCE_SECONDS - self._waited_seconds, 0.0) * 1000))
        self._waited_seconds += monotonic() - began
        return has_room


def is_pipe_or_terminal(descriptor: int) -> bool:
    kind = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)


def open_without_waiting(descriptor: int) -> int:
    """Open a pipe or a terminal anew, so that no write waits: others share `descriptor`, and may want to wait.

    Return `descriptor` itself if that fails, or for a socket, as systemd's journal has: it has room for many lines or
    for none.
    """
    if is_pipe_or_terminal(descriptor):
        with suppress(OSError):  # it is another user's, or there is no /proc
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return descriptor
