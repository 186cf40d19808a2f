"""Measures the host's memory, as limited by the container, the service and the process; decides nothing."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from keepsight.cgroups import CGROUP, OWN_CGROUPS, list_cgroups

MEMINFO, STATM = Path("/proc/meminfo"), Path("/proc/self/statm")
# Limits of one process (`ulimit -v`, `ulimit -d`), and the field of STATM that holds its usage in pages.
_OWN_LIMITS = ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5))
# The files of both cgroup versions: a limit, the usage, and the prefix of the names in `memory.stat`. Processes beyond
# `memory.high` (systemd's MemoryHigh) are not killed, but slowed down.
_LIMITS = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def measure_host_memory(
    meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS
) -> tuple[int, int]:
    """Return the total and the available bytes."""
    total, available = _measure_whole_host(meminfo)
    for folder in list_cgroups("memory", cgroup, own_cgroups):
        for limit_name, used_name, prefix in _LIMITS:
            limit, used = _read_number(folder / limit_name), _read_number(folder / used_name)
            if limit is not None and used is not None:
                kept = used - _measure_file_cache(folder / "memory.stat", prefix)
                total, available = min(total, limit), min(available, max(0, limit - kept))
    for limit, used in _own_limits():
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _own_limits() -> Iterator[tuple[int, int]]:
    """Yield each limit of this process, and how much of it is used."""
    if not STATM.exists():  # not Linux
        return
    pages = STATM.read_text().split()
    for kind, place in _OWN_LIMITS:
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield limit, int(pages[place]) * resource.getpagesize()


def _measure_file_cache(stat: Path, prefix: str) -> int:
    """Return the bytes that the kernel would reclaim: until then, weights that were just read count as used."""
    if not stat.exists():
        return 0
    numbers = dict(line.split() for line in stat.read_text().splitlines())
    return sum(int(numbers.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))


def _measure_whole_host(meminfo: Path) -> tuple[int, int]:
    if not meminfo.exists():  # not Linux
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
