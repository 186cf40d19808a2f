"""What a process and all that it started take: memory in fair shares, and processor time."""

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
    """Of all its threads, those that have ended included."""
    # Behind the name, which is in parentheses and may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
