"""Pins of entries that stay in a disk tier's folder, whatever the policy says.

A pin applies to the name, so an entry that was damaged or cleared is pinned again as soon as it is stored again.
"""

from pathlib import Path

from keepsight.ipc.shared_names import SharedNames


def pins_in(directory: Path) -> SharedNames:
    """Return the keys of pinned entries.

    Eviction lists them under the ledger's lock: once that lock was taken after pinning, the pin is in effect.
    """
    return SharedNames(directory / "pins")
