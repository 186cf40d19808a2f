"""A server as users start it: its process, its device, its memory."""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keepsight.ipc.run_directory import RunDirectory
from keepsight.observe.process_memory import with_descendants
from tests.place import FLAGS

COMMAND = [sys.executable, "-m", "keepsight"]
START_SECONDS, END_SECONDS = 120, 60
# In the log; with the port.
SERVED = r" is served on http://127\.0\.0\.1:(\d+)/v1"


@contextmanager
def serving(
    log: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield the process and the port named in its log; it runs on `place`'s device unless options say otherwise."""
    command = [*COMMAND, "serve", "--port", "0", *FLAGS, *options]
    variables = {**os.environ, **(environment or {})}
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables) as process,
    ):
        try:
            yield process, _wait_for_port(process, log)
        finally:
            process.kill()


@contextmanager
def routing(
    log: Path, *addresses: str, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The same for a router before servers at these addresses."""
    replicas = [word for address in addresses for word in ("--replica", address)]
    command = [*COMMAND, "route", "--port", "0", *replicas, *flags]
    variables = {**os.environ, **(environment or {})}
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, text=True, env=variables) as process,
    ):
        try:
            yield process, _wait_for_port(process, log, r"http://127\.0\.0\.1:(\d+)/v1 leads to ")
        finally:
            process.kill()


def _wait_for_port(process: subprocess.Popen[str], log: Path, line: str = SERVED) -> int:
    for _ in range(START_SECONDS * 10):
        if found := re.search(line, log.read_text()):
            return int(found[1])
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(log.read_text())


@dataclass(frozen=True)
class RealServer:
    """A server that is shut down cleanly."""

    url: str
    pid: int
    log: Path

    def memory_bytes(self) -> int:
        """Return the memory of all its processes; shared pages are counted once."""
        return sum(map(proportional_bytes, with_descendants(self.pid)))


@contextmanager
def real_server(*options: str, environment: Mapping[str, str] | None = None) -> Iterator[RealServer]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serving(log, "--no-log-requests", *options, environment=environment) as (process, port):
            try:
                yield RealServer(f"http://127.0.0.1:{port}", process.pid, log)
            finally:
                process.terminate()
                process.wait(END_SECONDS)


def run_directory_of(supervisor: int) -> Path:
    """Return the run directory that the supervisor holds open to keep its lock."""
    opened = (link.readlink() for link in Path(f"/proc/{supervisor}/fd").iterdir())
    return next(path for path in opened if path.name.startswith("keepsight-run-"))


def end_without_a_trace(supervisor: int, processes: Iterable[int]) -> None:
    """Kill the supervisor with SIGKILL, so that it cannot notify the others; check that no process or file is left."""
    directory, handles = run_directory_of(supervisor), [os.pidfd_open(pid) for pid in processes]
    os.kill(supervisor, signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], END_SECONDS)[0], "still running"
        os.close(handle)
    with RunDirectory.create():
        assert not directory.exists()


def proportional_bytes(pid: int, pages: str = "Pss") -> int:
    """Return the proportional memory of a process (shared pages count in part), or 0 if it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{pages}: +(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
