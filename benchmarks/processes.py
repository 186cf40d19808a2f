"""What a process and all that it started take: memory in fair shares, and processor time."""

import os
from contextlib import suppress
from pathlib import Path

from keepsight.observe.process_memory import with_descendants

_TICKS = os.sysconf("SC_CLK_TCK")


def proportional_mib(pid: int) -> float:
    """Pages that several processes share count in parts."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def family_mib(pid: int) -> float:
    total = 0.0
    for each in with_descendants(pid):
        with suppress(OSError):
            total += proportional_mib(each)
    return total


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
