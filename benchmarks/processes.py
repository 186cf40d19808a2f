"""Proportional memory and processor time of a process and all its descendants."""

import os
from contextlib import suppress
from pathlib import Path

from keepsight.observe.process_memory import with_descendants
from tests.real_server import proportional_bytes

_TICKS = os.sysconf("SC_CLK_TCK")


def family_mib(pid: int) -> float:
    return sum(map(proportional_bytes, with_descendants(pid))) / 2**20


def family_processor_seconds(pid: int) -> float:
    total = 0.0
    for each in with_descendants(pid):
        with suppress(OSError):
            total += processor_seconds(each)
    return total


def processor_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, including those that have ended."""
    # Parse after the name, which is in parentheses and may contain anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
