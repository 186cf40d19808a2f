"""How many cores there are to use, and who uses how many of them."""

import os


def count_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of(total: int, rank: int, num_sharers: int) -> int:
    """The part of one of so many that share; one at the least."""
    return max(1, total // num_sharers + (rank < total % num_sharers))
