"""The log of all processes of a server: standard error, whose reader cannot stop the server.

A pipe or a terminal that nobody reads is soon full, and whoever writes to it then waits for the reader. Invariant: the
lines of a process wait for at most a second, which is theirs again a minute later. One that still has no room is left
out and counted, as are those after it until there is room, without a wait.
"""

import errno
import logging
import os
import select
import stat
import sys
from contextlib import suppress
from time import monotonic, sleep

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# How long lines wait, and how long it takes until they may again: a reader that is slow only at times gets all.
PATIENCE_SECONDS, RENEWAL_SECONDS = 1.0, 60.0
# Between attempts: where a process waits for room, others do, too, and a terminal may have some, but too little.
PAUSE_SECONDS = 0.001
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
        self._patience_seconds, self._waited_until = PATIENCE_SECONDS, monotonic()
        kind = os.fstat(descriptor).st_mode
        # Not of a file: XFS and btrfs refuse at once whatever changes its times.
        self._may_refuse = (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)) and hasattr(os, "RWF_NOWAIT")
        # A pipe or a terminal that could not be opened anew: if it has room, it has it for this much.
        is_small = os.get_blocking(descriptor) and is_pipe_or_terminal(descriptor)
        self._max_waiting_bytes = select.PIPE_BUF if is_small else MAX_WRITE_BYTES
        self._encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note = f"({self._num_left_out} lines were left out, as nobody read them)\n" if self._num_left_out else ""
            before = self._encode(("\n" if self._is_inside_line else "") + note)
            line = before + self._encode(f"{self.format(record)}\n")
            num_written = self._write(line)
            if num_written:
                self._is_inside_line = not line[:num_written].endswith(b"\n")
            if num_written >= len(before):
                self._num_left_out = 0
            self._num_left_out += num_written < len(line)
        except Exception:
            self.handleError(record)

    def _encode(self, text: str) -> bytes:
        return text.encode(self._encoding, "backslashreplace")

    def _write(self, line: bytes) -> int:
        """Return how many bytes there was room for."""
        num_written = 0
        while num_written < len(line) and (self._poll.poll(0) or self._wait_for_room()):
            try:
                num_written += self._write_some(line[num_written:][:MAX_WRITE_BYTES])
            except BlockingIOError:  # another process was faster
                if not self._wait_for_room():
                    break
        return num_written

    def _write_some(self, data: bytes) -> int:
        """Write without waiting where the system can: other processes may have filled what had room."""
        if self._may_refuse:
            try:
                return os.pwritev(self._descriptor, [data], -1, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # an old kernel
                    raise
        return os.write(self._descriptor, data[: self._max_waiting_bytes])

    def _wait_for_room(self) -> bool:
        """Return whether there is room before the patience ends."""
        began = monotonic()
        renewed = (began - self._waited_until) * PATIENCE_SECONDS / RENEWAL_SECONDS
        patience = min(self._patience_seconds + renewed, PATIENCE_SECONDS)
        if self._num_left_out or patience < PAUSE_SECONDS:
            return False
        sleep(PAUSE_SECONDS)
        has_room = bool(self._poll.poll((patience - PAUSE_SECONDS) * 1000))
        self._waited_until = monotonic()
        self._patience_seconds = patience - (self._waited_until - began)
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
