"""How many cores there are to use, and who uses how many of them."""

import os
from pathlib import Path

# What a container may use, in microseconds of each period; "max": all.
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def count_cores(cpu_max: Path = CPU_MAX) -> int:
    """Those that this process may run on, or as many as its container is given the time of."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, cpu_max.read_text().split())
    except (OSError, ValueError):
        return own
    return max(1, min(own, quota // period))


def share_of(total: int, rank: int, num_sharers: int) -> int:
    """The part of one of so many that share; one at the least."""
    return max(1, total // num_sharers + (rank < total % num_sharers))
