"""Tells whether the program's own files have changed, so that the processes of a server all run the same program.

An upgrade under a running server changes what the next of its processes runs, beside others that run what was before.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from keepsight.errors import ServerStartError

PACKAGE = Path(__file__).parent
# With the sources of compiled libraries, which decide whether those are used.
_SUFFIXES = (".py", ".so", ".c", ".h")


def identify_program(package: Path = PACKAGE) -> str:
    """Name the sizes and modification times of all files that may be run. Takes some milliseconds."""
    digest = hashlib.sha256()
    for folder, subfolders, names in os.walk(package):
        subfolders.sort()
        for name in sorted(names):
            if name.endswith(_SUFFIXES):
                with suppress(OSError):  # it is being replaced
                    about = os.stat(f"{folder}/{name}")  # noqa: PTH116 - a Path takes longer than the call
                    where = f"{folder}/{name}".removeprefix(str(package))
                    digest.update(f"{where} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def check_program_is(identity: str, package: Path = PACKAGE) -> None:
    """Raise ServerStartError unless the program is still the one that was named so when the server started."""
    if identify_program(package) != identity:
        raise ServerStartError("Keepsight's own files were changed since the server started: restart the server")
