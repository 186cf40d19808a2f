"""One process of a server, as its supervisor sees it: how it was started, what it says, and how it ended.

Decides nothing: the supervisor does.
"""

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from keepsight.ipc.control import FAILED_AT_WORK, SupervisorEnd
from keepsight.ipc.take_signals import without_requests_to_end

# A process that exits by itself this soon after it was ready counts as a failed start: the next would hardly do better.
SETTLING_SECONDS = 3.0


class ChildProcess:
    def __init__(
        self, kind: str, rank: int, number: int, command: Sequence[str], pass_fds: Sequence[int], folder: Path | None
    ) -> None:
        """Start the process in a session of its own, which has no terminal.

        `rank`: the index among its kind. A replacement has the same rank, but never the same `number`. `folder`: its
        working directory; None: ours.
        """
        self.kind, self.rank, self.name = kind, rank, f"{kind}-{number}"
        self.ready_at: float | None = None
        ours, theirs = socket.socketpair()
        with theirs, without_requests_to_end():
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), pass_fds=pass_fds, cwd=folder, start_new_session=True
            )
        self.control = SupervisorEnd(ours)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.process.pid})"

    @property
    def is_ready(self) -> bool:
        return self.ready_at is not None

    @property
    def has_failed_to_start(self) -> bool:
        """For a process that has ended. Once it was ready, being killed or its work says nothing about a successor."""
        if self.ready_at is None:
            return True
        return 0 <= self.process.returncode != FAILED_AT_WORK and time.monotonic() - self.ready_at < SETTLING_SECONDS

    def describe_end(self) -> str:
        status = self.process.returncode
        if status < 0:
            cause = " (as when memory runs out)" if status == -signal.SIGKILL else ""
            return f"{self} was killed by {_name_signal(-status)}{cause}"
        return f"{self} ended with status {status}"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
