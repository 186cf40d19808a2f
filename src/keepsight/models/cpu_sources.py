"""Tells whether a library of CPU kernels was compiled from the sources beside it. Run by setup.py, too: without torch.

An older or newer one has the same functions, but may lay out their arguments differently: it would read wrong memory.
"""

import hashlib
from pathlib import Path


def identify_sources(models: Path) -> str:
    """Name the contents of the C files, which are compiled into a library; empty if there are none."""
    digest = hashlib.sha256()
    sources = sorted(models.glob("cpu_*.[ch]"))
    for path in sources:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest() if sources else ""


def is_compiled_from(identity: str, library: Path) -> bool:
    """Always true of sources that were left out of the installation: then nothing can have changed them."""
    return identity.encode() in library.read_bytes()
