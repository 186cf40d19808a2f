"""One process of a server, as its supervisor sees it: how it was started, what it says, and how it ended.

Decides nothing: the supervisor does.
"""

import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from keepsight.ipc.control import FAILED_AT_WORK, SupervisorEnd
from keepsight.ipc.take_signals import without_requests_to_end
from keepsight.silence import Silence

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
        # Since its last sign of life; None: it has given none so far. And for how long it may last; 0: any time.
        self.silence: Silence | None = None
        self.max_silent_seconds = 0.0
        # Whether it was killed for its silence.
        self.is_given_up = False
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

    @property
    def is_overdue(self) -> bool:
        """Whether it has been silent for so long that it is to be replaced."""
        silence, most = self.silence, self.max_silent_seconds
        return silence is not None and silence.is_long and 0 < most <= silence.seconds

    def describe_state(self) -> str:
        """Return what the system says of its main thread, as "T (stopped)": a hint at why it is silent."""
        try:
            found = re.search(r"^State:\s+(.+)$", Path(f"/proc/{self.process.pid}/status").read_text(), re.MULTILINE)
        except OSError:
            found = None
        return found[1] if found else "unknown"

    def describe_end(self) -> str:
        status = self.process.returncode
        if status < 0:
            of_kill = " (for its silence)" if self.is_given_up else " (as when memory runs out)"
            cause = of_kill if status == -signal.SIGKILL else ""
            return f"{self} was killed by {_name_signal(-status)}{cause}"
        return f"{self} ended with status {status}"


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
