"""Subprocesses that stop at a known point of our code, so that a test can kill them there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Just before the named function returns, the process prints a line and sleeps.
_STOP = """
import sys, time
from pathlib import Path
import numpy as np
def stop_in(module, name):
    real = getattr(module, name)
    def stopped(*arguments, **options):
        result = real(*arguments, **options)
        print("stopped", flush=True)
        time.sleep(600)
    setattr(module, name, stopped)
folder = Path(sys.argv[1])
"""


@contextmanager
def stopped_process(program: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process and yield it once it has reached the point where it stops."""
    command = [sys.executable, "-c", _STOP + program, str(folder), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "stopped\n"
            yield process
        finally:
            process.kill()


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
