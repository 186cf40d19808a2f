"""A server as users start it, for tests that are run by hand: its processes, its place, its memory."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keepsight.observe.process_memory import with_descendants

LONGEST_START_SECONDS = 120
LONGEST_END_SECONDS = 60


@dataclass(frozen=True)
class RealServer:
    url: str
    pid: int
    log: Path

    def memory_bytes(self) -> int:
        """Of all its processes; what they share is counted once."""
        return sum(map(_proportional_bytes, with_descendants(self.pid)))


@contextmanager
def real_server(*options: str, environment: Mapping[str, str] | None = None) -> Iterator[RealServer]:
    command = [sys.executable, "-m", "keepsight", "serve", "--port", "0", "--no-log-requests", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr, env={**os.environ, **(environment or {})})
        try:
            yield RealServer(_wait_for_url(process, log), process.pid, log)
        finally:
            process.terminate()
            process.wait(LONGEST_END_SECONDS)


def _wait_for_url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + LONGEST_START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r" is served on (http://\S+)/v1", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def _proportional_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
