"""The kernel's control groups that limit this process: those of its container or its service, in either version."""

from collections.abc import Iterator
from pathlib import Path

CGROUP, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def list_cgroups(controller: str, root: Path = CGROUP, own_cgroups: Path = OWN_CGROUPS) -> Iterator[Path]:
    """Folders, as far as they can be seen: a container sees only its own, as the root.

    Of the first version each controller has folders of its own, of the second all are in one.
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
