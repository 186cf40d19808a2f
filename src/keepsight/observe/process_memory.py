"""Memory and children of processes, as reported by the kernel."""

import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def with_descendants(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from with_descendants(child)


def children_of(pid: int) -> Iterator[int]:
    """Yield the children that any of the process's threads started; none if it has just ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for thread in threads:
        with suppress(OSError):  # the thread has just ended
            yield from map(int, (thread / "children").read_text().split())
