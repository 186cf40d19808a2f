"""One SQLite file in a server's run directory, which all its frontends read and write.

Whatever one of them was doing when it was killed is undone, and the file shrinks as things go.  It ends with the
server.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from keepsight.ipc.run_directory import RunDirectory

# For another frontend that is just writing.
PATIENCE_SECONDS = 10.0
# That what comes leaves free, for what is written of it.
_SPARE_BYTES = 2**20
# Of the file.
_PRAGMAS_OF_NEW = ("page_size = 32768", "auto_vacuum = FULL")
# It need not outlive the machine; nor may there be another folder to write to.
_PRAGMAS = ("synchronous = OFF", "foreign_keys = ON", "temp_store = MEMORY")
# What anything may raise here: no room, no time, a file or a folder that is none any more.
FAULTS = (sqlite3.DatabaseError, OSError)


class SharedDatabase:
    """Shared by threads: one at a time."""

    def __init__(self, folder: Path, name: str, schema: str) -> None:
        self._run_directory = RunDirectory(folder)
        # To be held by whoever uses the connection.
        self.alone = threading.Lock()
        self.connection = sqlite3.connect(
            folder / name, timeout=PATIENCE_SECONDS, isolation_level=None, check_same_thread=False
        )
        with ExitStack() as undoing:
            undoing.callback(self.connection.close)
            # They write though the file has them already, for which there need not be room any more.
            [(is_set,)] = self.connection.execute("PRAGMA auto_vacuum")
            for pragma in _PRAGMAS if is_set else _PRAGMAS_OF_NEW + _PRAGMAS:
                self.connection.execute(f"PRAGMA {pragma}")
            self.connection.executescript(f"BEGIN IMMEDIATE;{schema}COMMIT;")
            undoing.pop_all()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """All that is written or nothing, and no other frontend in between.  Whoever calls is alone."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def has_room(self, num_bytes: int, largest: int) -> bool:
        """So that what is kept, of which one has `largest`, can go again: to remove takes as much room for a moment."""
        return self._run_directory.num_free_bytes >= num_bytes + max(num_bytes, largest) + _SPARE_BYTES

    def close(self) -> None:
        with self.alone:
            self.connection.close()
