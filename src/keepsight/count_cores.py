"""How many cores there are to use, and who uses how many of them."""

import os
from pathlib import Path

from keepsight.cgroups import CGROUP, OWN_CGROUPS, list_cgroups


def count_cores(cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Those that this process may run on, or as many as its container or its service is given the time of."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = (_read_share(folder) for folder in list_cgroups("cpu", cgroup, own_cgroups))
    return max(1, min(own, *(own if share is None else share for share in given)))


def _read_share(folder: Path) -> int | None:
    """Whole cores; None: nothing is said, or all."""
    said = _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    match said.split():
        case [quota, period] if quota.isdigit():  # of microseconds in each period; neither "max" nor -1
            return int(quota) // int(period)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def share_of(total: int, rank: int, num_sharers: int) -> int:
    """The part of one of so many that share; one at the least."""
    return max(1, total // num_sharers + (rank < total % num_sharers))
