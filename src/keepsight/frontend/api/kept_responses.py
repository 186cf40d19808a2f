"""Responses that later requests can continue, with their inputs; shared by all frontends of a server.

Knows neither HTTP nor the contents. A response belongs to its tenant; to others it does not exist. Invariant: what a
tenant holds is within its limit of bytes. The least recently used response is evicted first; a conversation is used as
a whole. The cost of an operation does not depend on how much is held.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from keepsight.errors import ResponseStoreError, UnknownResponseError
from keepsight.ipc.shared_database import FAULTS, SharedDatabase

# Contents have a table of their own: in one table, each update of the bookkeeping would rewrite them.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    previous TEXT,
    used INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used);
CREATE INDEX IF NOT EXISTS responses_by_tenant ON responses (tenant, used);
CREATE INDEX IF NOT EXISTS responses_by_size ON responses (num_bytes);
CREATE TABLE IF NOT EXISTS contents (
    id TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE,
    asked BLOB NOT NULL,
    response BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY,
    response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE
);
CREATE INDEX IF NOT EXISTS items_by_response ON items (response);
CREATE TABLE IF NOT EXISTS held (tenant TEXT PRIMARY KEY, num_bytes INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON responses BEGIN
    INSERT INTO held VALUES (new.tenant, new.num_bytes)
    ON CONFLICT DO UPDATE SET num_bytes = num_bytes + excluded.num_bytes;
END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON responses BEGIN
    UPDATE held SET num_bytes = num_bytes - old.num_bytes WHERE tenant = old.tenant;
END;
"""
# The turns up to a given response, with their distances from it.
_TURNS = """
WITH RECURSIVE turns (id, previous, num_bytes, distance) AS (
    SELECT id, previous, num_bytes, 0 FROM responses WHERE id = :id AND tenant = :tenant
    UNION ALL
    SELECT earlier.id, earlier.previous, earlier.num_bytes, distance + 1
    FROM responses AS earlier JOIN turns ON earlier.id = turns.previous WHERE earlier.tenant = :tenant
)
"""


class Turn(NamedTuple):
    """As JSON: the input that the turn adds to those before it, and the whole response."""

    asked: bytes
    response: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.asked) + len(self.response)


class _Known(NamedTuple):
    id: str
    previous: str | None
    num_bytes: int


class KeptResponses:
    """Thread-safe. Methods raise ResponseStoreError if the database fails."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: limit per tenant."""
        self.max_bytes = max_bytes
        self._shared = SharedDatabase(folder, "responses.sqlite", _SCHEMA)
        self._database = self._shared.connection

    # Adding and removing ----------------------------------------------------------------------------------------

    def keep(
        self, tenant: str, response_id: str, previous: str | None, turn: Turn, item_ids: Iterable[str] = ()
    ) -> bool:
        """Keep a response. `item_ids`: the ids of the items in it.

        Returns False if it could not be continued, as its conversation has no room or has lost a part.
        """
        with self._writing():
            earlier = [] if previous is None else self._find_turns(tenant, previous)
            is_whole = previous is None or _is_whole(earlier)
            if not is_whole or sum(each.num_bytes for each in earlier) + turn.num_bytes > self.max_bytes:
                return False
            self._use(earlier)  # so that it is evicted last
            self._evict(tenant, turn.num_bytes)
            if not self._has_room(turn.num_bytes):
                return False
            self._database.execute(
                "INSERT INTO responses SELECT ?, ?, ?, coalesce(max(used), 0) + 1, ? FROM responses",
                (response_id, tenant, previous, turn.num_bytes),
            )
            self._database.execute("INSERT INTO contents VALUES (?, ?, ?)", (response_id, *turn))
            items = [(item_id, response_id) for item_id in item_ids]
            self._database.executemany("INSERT INTO items VALUES (?, ?)", items)
            return True

    def delete(self, tenant: str, response_id: str) -> None:
        with self._writing():
            gone = self._database.execute("DELETE FROM responses WHERE id = ? AND tenant = ?", (response_id, tenant))
            if not gone.rowcount:
                raise _unknown(response_id, "id")

    def close(self) -> None:
        self._shared.close()

    # Lookup -----------------------------------------------------------------------------------------------------

    def get(self, tenant: str, response_id: str) -> bytes:
        with self._writing():
            known = self._find_one("id = ? AND tenant = ?", response_id, tenant)
            if known is None:
                raise _unknown(response_id, "id")
            self._use([known])
            return self._read(known).response

    def find_responses(self, tenant: str, item_ids: Iterable[str]) -> dict[str, bytes]:
        """Return the responses that have any of these items, keyed by their ids."""
        with self._writing():
            where = "id = (SELECT response FROM items WHERE id = ?) AND tenant = ?"
            found = [self._find_one(where, item_id, tenant) for item_id in item_ids]
            known = {each.id: each for each in found if each is not None}
            self._use([*known.values()])
            return {each.id: self._read(each).response for each in known.values()}

    def count_bytes(self, tenant: str, response_id: str, field: str) -> int:
        """Return the bytes of the conversation that ends with a response. `field`: the caller's name for it."""
        with self._writing():
            return sum(each.num_bytes for each in self._find_conversation(tenant, response_id, field))

    def read(self, tenant: str, response_id: str, field: str) -> list[Turn]:
        """Return the turns of the conversation that ends with a response, the first turn first."""
        with self._writing():
            known = self._find_conversation(tenant, response_id, field)
            self._use(known)
            return [self._read(each) for each in known]

    def check_invariants(self) -> None:
        with self._writing():
            held = self._database.execute(
                "SELECT sum(num_bytes), sum(length(asked) + length(response)), "
                "(SELECT num_bytes FROM held WHERE held.tenant = responses.tenant) "
                "FROM responses FULL JOIN contents USING (id) GROUP BY tenant"
            ).fetchall()
        assert all(counted == known == num_bytes <= self.max_bytes for counted, known, num_bytes in held)

    # With the lock held -----------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._shared.alone:
            try:
                with self._shared.at_once():
                    yield
            except FAULTS as error:
                raise ResponseStoreError(f"responses cannot be kept or read now: {error}") from error

    def _find_turns(self, tenant: str, response_id: str) -> list[_Known]:
        query = f"{_TURNS} SELECT id, previous, num_bytes FROM turns ORDER BY distance DESC"
        return [_Known(*row) for row in self._database.execute(query, {"id": response_id, "tenant": tenant})]

    def _find_one(self, where: str, *values: str) -> _Known | None:
        query = f"SELECT id, previous, num_bytes FROM responses WHERE {where}"
        row = self._database.execute(query, values).fetchone()
        return None if row is None else _Known(*row)

    def _find_conversation(self, tenant: str, response_id: str, field: str) -> list[_Known]:
        known = self._find_turns(tenant, response_id)
        if not known:
            raise _unknown(response_id, field)
        if not _is_whole(known):
            raise UnknownResponseError(field, "an earlier response of its conversation is no longer stored here")
        return known

    def _read(self, known: _Known) -> Turn:
        [row] = self._database.execute("SELECT asked, response FROM contents WHERE id = ?", (known.id,))
        return Turn(*row)

    def _use(self, known: Sequence[_Known]) -> None:
        [(last,)] = self._database.execute("SELECT coalesce(max(used), 0) FROM responses")
        numbers = zip(itertools.count(last + 1), (each.id for each in known))
        self._database.executemany("UPDATE responses SET used = ? WHERE id = ?", [*numbers])

    def _evict(self, tenant: str, num_bytes: int) -> None:
        """Delete the tenant's least recently used responses until `num_bytes` more fit into its limit."""
        held = self._database.execute("SELECT num_bytes FROM held WHERE tenant = ?", (tenant,)).fetchone()
        excess = (held[0] if held else 0) + num_bytes - self.max_bytes
        while excess > 0:
            [(response_id, size)] = self._database.execute(
                "SELECT id, num_bytes FROM responses WHERE tenant = ? ORDER BY used LIMIT 1", (tenant,)
            )
            self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            excess -= size

    def _has_room(self, num_bytes: int) -> bool:
        [(largest,)] = self._database.execute("SELECT coalesce(max(num_bytes), 0) FROM responses")
        return self._shared.has_room(num_bytes, largest)


def _is_whole(known: Sequence[_Known]) -> bool:
    """Return whether the turns begin with one that continues no other."""
    return bool(known) and known[0].previous is None


def _unknown(response_id: str, field: str) -> UnknownResponseError:
    return UnknownResponseError(field, f"no response with the id {response_id[:64]!r} is stored here (any more)")
