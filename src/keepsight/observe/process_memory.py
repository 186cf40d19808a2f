"""What the kernel says of processes: their memory, and whose children they are."""

import resource
from collections.abc import Iterator
from contextlib import suppress
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
    """Whichever of its threads started them; none if it has just ended."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for thread in threads:
        with suppress(OSError):  # that one has
            yield from map(int, (thread / "children").read_text().split())
