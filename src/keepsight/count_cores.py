"""Count the usable cores, and divide them among processes."""

import os
from pathlib import Path

from keepsight.cgroups import CGROUP, OWN_CGROUPS, list_cgroups


def count_cores(cgroup: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> int:
    """Return the number of cores in this process's affinity mask, or fewer if its cgroup's CPU quota is lower."""
    own = len(list_cores()) or os.cpu_count() or 1
    given = (_read_share(folder) for folder in list_cgroups("cpu", cgroup, own_cgroups))
    return max(1, min(own, *(own if share is None else share for share in given)))


def list_cores() -> list[int]:
    """Return the cores in this process's affinity mask, sorted; none if the system does not tell."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # a filter of system calls refuses it; not Linux
        return []


def _read_share(folder: Path) -> int | None:
    """Return the CPU quota in whole cores; None if unset or unlimited."""
    limits = _read(folder / "cpu.max") or f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    match limits.split():
        case [quota, period] if quota.isdigit():  # microseconds per period; neither "max" nor -1
            return int(quota) // int(period)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def share_of(total: int, rank: int, num_sharers: int) -> int:
    """Return the share of sharer `rank` in `total`; at least 1."""
    return max(1, total // num_sharers + (rank < total % num_sharers))
