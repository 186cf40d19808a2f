"""The shared database when its file can no longer be written."""

import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepsight.ipc.shared_database import SharedDatabase

SCHEMA = "CREATE TABLE IF NOT EXISTS things (name TEXT);"


@contextmanager
def without_room() -> Iterator[None]:
    """Make every write to a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_existing_file_can_be_opened_on_a_full_disk(tmp_path: Path) -> None:
    first = SharedDatabase(tmp_path, "things", SCHEMA)
    first.connection.execute("INSERT INTO things VALUES ('one')")
    first.close()
    with without_room():
        again = SharedDatabase(tmp_path, "things", SCHEMA)
        assert again.connection.execute("SELECT name FROM things").fetchall() == [("one",)]
        again.close()


def test_creation_on_a_full_disk_fails_until_there_is_room(tmp_path: Path) -> None:
    with without_room(), pytest.raises(sqlite3.OperationalError):
        SharedDatabase(tmp_path, "things", SCHEMA)
    SharedDatabase(tmp_path, "things", SCHEMA).close()


def test_the_file_shrinks_after_deletes_by_any_frontend(tmp_path: Path) -> None:
    first, second = (SharedDatabase(tmp_path, "things", SCHEMA) for _ in range(2))
    first.connection.execute("INSERT INTO things VALUES (zeroblob(1000000))")
    second.connection.execute("DELETE FROM things")
    assert (tmp_path / "things").stat().st_size < 200_000
    first.close()
    second.close()
