"""One SQLite file in a server's run directory, which all its frontends read and write.

A killed frontend's unfinished transaction is rolled back, and the file shrinks as entries are deleted. The file does
not outlive the server.
"""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from keepsight.ipc.run_directory import RunDirectory

# How long to wait for another frontend that is writing.
PATIENCE_SECONDS = 10.0
# Bytes that new content must leave free, for what is written about it.
_SPARE_BYTES = 2**20
# Stored in the file, and so set only in a new one.
_PRAGMAS_OF_NEW = ("page_size = 32768", "auto_vacuum = FULL")
# The file need not survive a crash of the machine; and there may be no folder for temporary files.
_PRAGMAS = ("synchronous = OFF", "foreign_keys = ON", "temp_store = MEMORY")
# Errors that any operation here may raise: no room, a timeout, a file or folder that is damaged or gone.
FAULTS = (sqlite3.DatabaseError, OSError)


class SharedDatabase:
    """May be used by several threads, one at a time."""

    def __init__(self, folder: Path, name: str, schema: str) -> None:
        self._run_directory = RunDirectory(folder)
        # Must be held while using the connection.
        self.alone = threading.Lock()
        self.connection = sqlite3.connect(
            folder / name, timeout=PATIENCE_SECONDS, isolation_level=None, check_same_thread=False
        )
        with ExitStack() as undoing:
            undoing.callback(self.connection.close)
            # Not set again in a file that has them: that would write to it, and there may be no more room.
            [(is_set,)] = self.connection.execute("PRAGMA auto_vacuum")
            for pragma in _PRAGMAS if is_set else _PRAGMAS_OF_NEW + _PRAGMAS:
                self.connection.execute(f"PRAGMA {pragma}")
            self.connection.executescript(f"BEGIN IMMEDIATE;{schema}COMMIT;")
            undoing.pop_all()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Write all or nothing, with no other frontend writing in between. The caller must hold `alone`."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.connection.execute("COMMIT")
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def has_room(self, num_bytes: int, largest: int) -> bool:
        """Return whether `num_bytes` more fit, leaving room to delete any entry: that takes as much room for a moment.

        `largest`: the bytes of the largest entry kept so far.
        """
        return self._run_directory.num_free_bytes >= num_bytes + max(num_bytes, largest) + _SPARE_BYTES

    def close(self) -> None:
        with self.alone:
            self.connection.close()
