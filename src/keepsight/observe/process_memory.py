"""What the kernel says of processes: their memory, and whose children they are."""

import resource
from collections.abc import Iterator
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def with_descendants(pid: int) -> Iterator[int]:
    yield pid
    for child in children_of(pid):
        yield from with_descendants(child)


def children_of(pid: int) -> Iterator[int]:
    """Whichever of its threads started them."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            own = children.read_text().split()
        except OSError:  # it has just ended
            continue
        yield from map(int, own)
