"""Responses that later requests go on from, and what was asked for them; shared by all frontends of a server.

Knows neither HTTP nor what is in them.  A response belongs to its tenant; to others it does not exist.  Invariant: what
one tenant holds is within the bytes that it may; what was used longest ago goes for what comes, and a conversation is
used as a whole.
"""

import itertools
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from keepsight.errors import ResponseStoreError, UnknownResponseError
from keepsight.ipc.shared_database import SharedDatabase

logger = logging.getLogger(__name__)
# Bytes lie apart: what is counted would be written with them each time.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    previous TEXT,
    used INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (tenant, used, num_bytes);
CREATE TABLE IF NOT EXISTS contents (
    id TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE,
    input BLOB NOT NULL,
    response BLOB
);
"""
_CONVERSATION = """
WITH RECURSIVE turns (id, previous, distance) AS (
    SELECT id, previous, 0 FROM responses WHERE id = :id AND tenant = :tenant
    UNION ALL
    SELECT earlier.id, earlier.previous, distance + 1
    FROM responses AS earlier JOIN turns ON earlier.id = turns.previous WHERE earlier.tenant = :tenant
)
SELECT id, previous, input, response FROM turns JOIN contents USING (id) ORDER BY distance DESC
"""


class Turn(NamedTuple):
    """As JSON: what was asked beyond the turns before it, and the whole response."""

    input: bytes
    response: bytes


class KeptResponses:
    """Shared by threads."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: of each tenant."""
        self._max_bytes = max_bytes
        self._shared = SharedDatabase(folder, "responses.sqlite", _SCHEMA)
        self._database = self._shared.connection

    # Coming and going -------------------------------------------------------------------------------------------

    def begin(self, tenant: str, response_id: str, previous: str | None, asked: bytes) -> bool:
        """What is asked is kept, and can be found once it is answered.  False: there is no room for it."""
        try:
            with self._writing():
                if not self._make_room(tenant, len(asked)):
                    return False
                self._database.execute(
                    "INSERT INTO responses SELECT ?, ?, ?, coalesce(max(used), 0) + 1, ? FROM responses",
                    (response_id, tenant, previous, len(asked)),
                )
                self._database.execute("INSERT INTO contents VALUES (?, ?, NULL)", (response_id, asked))
                return True
        except ResponseStoreError as error:
            return _note_not_kept(error)

    def finish(self, tenant: str, response_id: str, response: bytes) -> bool:
        """False: it cannot be found, as there is no room for it (any more)."""
        try:
            with self._writing():
                self._use([response_id])  # so that it goes last
                if not self._make_room(tenant, len(response)):
                    return False
                grown = self._database.execute(
                    "UPDATE responses SET num_bytes = num_bytes + ? WHERE id = ?", (len(response), response_id)
                )
                self._database.execute("UPDATE contents SET response = ? WHERE id = ?", (response, response_id))
                return grown.rowcount > 0
        except ResponseStoreError as error:
            return _note_not_kept(error)

    def delete(self, tenant: str, response_id: str) -> None:
        with self._writing():
            gone = self._database.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant))
            if not gone.rowcount:
                raise _unknown(response_id, "id")

    def close(self) -> None:
        self._shared.close()

    # Looking ----------------------------------------------------------------------------------------------------

    def get(self, tenant: str, response_id: str) -> bytes:
        with self._writing():
            rows = self._database.execute(
                "SELECT response FROM responses JOIN contents USING (id) "
                "WHERE id = ? AND tenant = ? AND response IS NOT NULL",
                (response_id, tenant),
            ).fetchall()
            if not rows:
                raise _unknown(response_id, "id")
            self._use([response_id])
        [(response,)] = rows
        assert isinstance(response, bytes)
        return response

    def find_turns(self, tenant: str, response_id: str, field: str) -> list[Turn]:
        """Of the conversation that ends with it, the first first.  `field`: what the caller calls it."""
        with self._writing():
            rows = self._database.execute(_CONVERSATION, {"id": response_id, "tenant": tenant}).fetchall()
            if not rows or rows[-1][3] is None:
                raise _unknown(response_id, field)
            if rows[0][1] is not None:
                raise UnknownResponseError(field, "an earlier response of its conversation is not kept here any more")
            self._use([row[0] for row in rows])
        return [Turn(asked, response) for _, _, asked, response in rows]

    def check_invariants(self) -> None:
        with self._writing():
            held = self._database.execute(
                "SELECT sum(num_bytes), sum(length(input) + coalesce(length(response), 0)) "
                "FROM responses FULL JOIN contents USING (id) GROUP BY tenant"
            ).fetchall()
        assert all(counted == num_bytes <= self._max_bytes for counted, num_bytes in held)

    # With the lock ----------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._shared.alone():
            try:
                with self._shared.at_once():
                    yield
            except sqlite3.OperationalError as error:
                raise ResponseStoreError(f"responses cannot be kept or read now: {error}") from error

    def _make_room(self, tenant: str, num_bytes: int) -> bool:
        if num_bytes > self._max_bytes:
            return False
        rows = self._database.execute(
            "SELECT id, num_bytes FROM responses WHERE tenant = ? ORDER BY used", (tenant,)
        ).fetchall()
        excess = sum(size for _, size in rows) + num_bytes - self._max_bytes
        for response_id, size in rows:
            if excess <= 0:
                break
            self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            excess -= size
        largest = max((size for _, size in rows), default=0)
        return excess <= 0 and self._shared.has_room(num_bytes, largest)

    def _use(self, response_ids: list[str]) -> None:
        [(last,)] = self._database.execute("SELECT coalesce(max(used), 0) FROM responses")
        self._database.executemany(
            "UPDATE responses SET used = ? WHERE id = ?", [*zip(itertools.count(last + 1), response_ids)]
        )


def _note_not_kept(error: ResponseStoreError) -> Literal[False]:
    """Who asked is answered all the same."""
    logger.warning("%s", error)
    return False


def _unknown(response_id: str, field: str) -> UnknownResponseError:
    return UnknownResponseError(field, f"no response of the id {response_id[:64]!r} is kept here, or not any more")
