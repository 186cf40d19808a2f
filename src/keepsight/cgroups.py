"""The cgroups (v1 or v2) that limit this process: those of its container or its service."""

from collections.abc import Iterator
from pathlib import Path

CGROUP, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def list_cgroups(controller: str, root: Path, own_cgroups: Path) -> Iterator[Path]:
    """Yield the cgroup folders as far as they are visible: a container sees only its own, as the root.

    In v1 each controller has its own folders; in v2 all share one.
    """
    yield root
    yield root / controller
    if not own_cgroups.exists():
        return
    for line in own_cgroups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            folder = root / controller if controllers else root
            for name in Path(path).parts[1:]:
                folder /= name
                yield folder
