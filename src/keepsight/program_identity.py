"""Has the processes of a server all run the same program: how Python is started, and whether our files have changed.

An upgrade under a running server changes what the next of its processes runs, beside others that run what was before.
"""

import hashlib
import os
import sys
from contextlib import suppress
from pathlib import Path

from keepsight.errors import ServerStartError

PACKAGE = Path(__file__).parent
# -P: files in the current directory must not be imported; -I: nor those of PYTHONPATH, if we were started so ourselves.
PYTHON = (sys.executable, "-I" if sys.flags.isolated else "-P")
# With the sources of compiled libraries, which decide whether those are used.
_SUFFIXES = (".py", ".so", ".c", ".h")


def identify_program(package: Path = PACKAGE) -> str:
    """Name the contents of all files that may be run, not their times, as a file may be written again unchanged; and
    where they lie. Takes some tens of milliseconds.
    """
    digest = hashlib.sha256()
    for folder, subfolders, names in os.walk(package):
        subfolders[:] = sorted(name for name in subfolders if _is_package(Path(folder, name)))
        for name in sorted(names):
            if name.endswith(_SUFFIXES) and _can_be_imported(name):
                with suppress(OSError):  # it is being replaced
                    content = Path(folder, name).read_bytes()
                    where = f"{folder}/{name}".removeprefix(str(package))
                    digest.update(f"{where} {len(content)}\n".encode() + content)
    return f"{digest.hexdigest()} {_shown(package)}"


def _is_package(folder: Path) -> bool:
    """Others hold copies that an editor or a notebook made."""
    return _can_be_imported(folder.name) and (folder / "__init__.py").exists()


def _can_be_imported(name: str) -> bool:
    return name.partition(".")[0].isidentifier()


def check_program_is(identity: str, package: Path = PACKAGE) -> None:
    """Raise ServerStartError unless the program is still the one that was named so when the server started."""
    contents, _, place = identity.partition(" ")
    if identify_program(package).startswith(f"{contents} "):
        return
    # Through a link it may be the same place.
    if os.path.realpath(place) != os.path.realpath(_shown(package)):
        how = "install the second, or name the folder that it lies in with PYTHONPATH"
        raise ServerStartError(f"the server's processes would run {_shown(package)}, not {place}: {how}")
    raise ServerStartError("Keepsight's own files were changed since the server started: restart the server")


def _shown(package: Path) -> str:
    """Return the path in characters that can be sent and printed."""
    return str(package).encode(errors="replace").decode()
