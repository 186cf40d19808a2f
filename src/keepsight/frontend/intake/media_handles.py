"""Uploaded pictures, films, sounds and PDFs, their bytes and metadata; each is named by a handle until it expires.

Shared by all frontends of a server, as is the table of who pins which pixels. Knows neither HTTP nor the
pixels themselves. A handle belongs to its tenant; to others it does not exist.
Invariants: each tenant stays within its quota, in bytes and in number, and nothing expired is ever found; handles live
as long as promised however the wall clock is set; a new id is greater than all existing ones, so that listing can
continue after an id that has since been deleted.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from keepsight.errors import MediaQuotaError, MediaStoreError, UnknownHandleError
from keepsight.ipc.shared_database import FAULTS, SharedDatabase
from keepsight.media import Geometry

ID_PREFIX = "media_"
# The upload time in microseconds since 1970, then random digits that cannot be guessed.
_ID = re.compile(rf"{ID_PREFIX}([0-9a-f]{{16}})[0-9a-f]{{32}}")
# Greater than every id, and not an id itself.
_LAST_ID = f"{ID_PREFIX}~"
DEFAULT_TTL_SECONDS = 3600.0
# Contents have a table of their own: in `media` they would be rewritten with each update of a counter. `expires` and
# `pinned_until` are times of the monotonic clock, which all processes share; `ahead` is added to show them.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS media (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    num_samples INTEGER NOT NULL,
    num_pages INTEGER NOT NULL,
    filename TEXT,
    media_type TEXT NOT NULL,
    purpose TEXT NOT NULL,
    created REAL NOT NULL,
    ahead REAL NOT NULL,
    expires REAL NOT NULL,
    pinned_until REAL,
    num_uses INTEGER NOT NULL DEFAULT 0,
    num_spared INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS media_by_end ON media (expires);
CREATE TABLE IF NOT EXISTS contents (
    id TEXT PRIMARY KEY REFERENCES media (id) ON DELETE CASCADE,
    content BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS pins (
    tenant TEXT NOT NULL,
    media_id TEXT NOT NULL,
    media_hash TEXT NOT NULL,
    expires REAL NOT NULL,
    PRIMARY KEY (tenant, media_id, media_hash)
);
CREATE INDEX IF NOT EXISTS pins_by_hash ON pins (media_hash);
"""


@dataclass(frozen=True)
class FileLabel:
    """The client's description of an upload: stored and returned, but without effect on how media are read."""

    filename: str | None = None
    media_type: str = "application/octet-stream"
    # OpenAI's term.
    purpose: str = "user_data"


@dataclass(frozen=True, slots=True)
class MediaHandle:
    """An upload without its bytes. The fields are named like the columns of the table `media`."""

    id: str
    sha256: str
    num_bytes: int
    width: int
    height: int
    # 0 unless it is a sound, which has no width or height.
    num_samples: int
    # 0 unless it is a PDF, which has no width or height.
    num_pages: int
    # As in `FileLabel`.
    filename: str | None
    media_type: str
    purpose: str
    # Seconds since 1970, by the wall clock at the upload.
    created: float
    expires: float
    pinned_until: float | None
    # The number of requests that used it, and how many of them needed nothing to be made from its bytes.
    num_uses: int
    num_spared: int


class HandlePage(NamedTuple):
    """Some of a tenant's handles in the order of a list, and whether others follow."""

    shown: list[MediaHandle]
    has_more: bool = False

    @property
    def ends(self) -> tuple[str | None, str | None]:
        """The first and the last id; the next page begins after the last."""
        return (self.shown[0].id, self.shown[-1].id) if self.shown else (None, None)


class PinHolder(NamedTuple):
    """Who pins pixels: a tenant's handle; its requests (`media_id` is ""), whose pins have a quota; `ADMINISTRATOR`."""

    tenant: str
    media_id: str = ""


# No tenant's name.
ADMINISTRATOR = PinHolder("administrator")
NO_LABEL = FileLabel()
_ITS_PIN = "WHERE tenant = ? AND media_id = ? AND media_hash = ?"
_SHOWN = {"expires": "expires + ahead", "pinned_until": "pinned_until + ahead"}
_COLUMNS = ", ".join(_SHOWN.get(field.name, field.name) for field in fields(MediaHandle))


@dataclass(frozen=True, slots=True)
class MediaQuota:
    """Limits for each tenant."""

    max_bytes: int
    max_count: int


class MediaHandles:
    """The store of uploads. May be used from several threads."""

    def __init__(
        self,
        folder: Path,
        quota: MediaQuota,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._quota, self._clock, self._wall_clock = quota, clock, wall_clock
        self._shared = SharedDatabase(folder, "media.sqlite", _SCHEMA)
        self._database = self._shared.connection

    # Lookup ---------------------------------------------------------------------------------------------------

    def get(self, tenant: str, media_id: str, field: str = "id") -> MediaHandle:
        """Return a handle, or raise UnknownHandleError; `field` is the caller's name for the id."""
        with self._reading():
            return self._find(tenant, media_id, field)

    def read(self, tenant: str, media_id: str, field: str = "id") -> bytes:
        with self._reading():
            (content,) = self._find_row("(SELECT content FROM contents WHERE id = media.id)", tenant, media_id, field)
        assert isinstance(content, bytes)
        return content

    def page(
        self,
        tenant: str,
        limit: int,
        start: str | None = None,
        field: str = "after",
        *,
        is_ascending: bool = False,
        purpose: str | None = None,
    ) -> HandlePage:
        """Return at most `limit` handles after `start`, which may no longer exist; newest first unless `is_ascending`.

        `field` is the caller's name for `start`.
        """
        beyond, order, first = (">", "ASC", ID_PREFIX) if is_ascending else ("<", "DESC", _LAST_ID)
        if start is not None and not _ID.fullmatch(start):
            raise _unknown(start, field)
        with self._reading():
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM media WHERE tenant = ? AND expires > ? AND id {beyond} ? "
                f"AND purpose = coalesce(?, purpose) ORDER BY id {order} LIMIT ?",
                (tenant, self._clock(), start or first, purpose, limit + 1),
            )
            found = [MediaHandle(*row) for row in rows]
        return HandlePage(found[:limit], len(found) > limit)

    def end_of_pin(self, holder: PinHolder, media_hash: str) -> float | None:
        """Return when the holder's pin of these pixels ends; None if it has none."""
        query = f"SELECT expires FROM pins {_ITS_PIN} AND expires > ?"
        with self._reading():
            row = self._database.execute(query, (*holder, media_hash, self._clock())).fetchone()
            return None if row is None else row[0]

    def end_of_pins(self, media_hash: str) -> float | None:
        """Return when the last pin of these pixels ends, whoever holds it; None if nobody does."""
        query = "SELECT max(expires) FROM pins WHERE media_hash = ? AND expires > ?"
        with self._reading():
            [(end,)] = self._database.execute(query, (media_hash, self._clock()))
        assert end is None or isinstance(end, float)
        return end

    # Changes --------------------------------------------------------------------------------------------------

    def add(
        self,
        tenant: str,
        content: bytes,
        geometry: Geometry,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        num_pages: int = 0,
        label: FileLabel = NO_LABEL,
    ) -> MediaHandle:
        """Store an upload. Raises MediaQuotaError if it exceeds the quota: no unexpired upload is evicted."""
        size = geometry.width, geometry.height, geometry.num_samples, num_pages
        names = label.filename, label.media_type, label.purpose
        digest = hashlib.sha256(content).hexdigest()
        with self._writing() as now:
            self._check_quota(tenant, len(content))
            self._check_room(len(content))
            created = self._wall_clock()
            media_id = self._draw_id(created)
            values = media_id, tenant, digest, len(content), *size, *names, created, created - now, now + ttl_seconds
            self._database.execute(
                "INSERT INTO media (id, tenant, sha256, num_bytes, width, height, num_samples, num_pages, filename, "
                f"media_type, purpose, created, ahead, expires) VALUES ({', '.join('?' * len(values))})",
                values,
            )
            self._database.execute("INSERT INTO contents (id, content) VALUES (?, ?)", (media_id, content))
            return self._find(tenant, media_id, "id")

    def delete(self, tenant: str, media_id: str) -> list[str]:
        """Delete a handle and its pins; return the media hashes that it had pinned."""
        with self._writing():
            self._find(tenant, media_id, "id")
            pins = self._database.execute("DELETE FROM pins WHERE media_id = ? RETURNING media_hash", (media_id,))
            media_hashes = [media_hash for (media_hash,) in pins.fetchall()]
            self._database.execute("DELETE FROM media WHERE id = ?", (media_id,))
            return media_hashes

    def pin(self, tenant: str, media_id: str, ttl_seconds: float) -> MediaHandle:
        """Keep the handle for at least `ttl_seconds` from now."""
        with self._writing() as now:
            self._find(tenant, media_id, "id")
            self._database.execute(
                "UPDATE media SET pinned_until = max(coalesce(pinned_until, 0), :until), "
                "expires = max(expires, :until) WHERE id = :id",
                {"until": now + ttl_seconds, "id": media_id},
            )
            return self._find(tenant, media_id, "id")

    def note_use(self, media_id: str, *, was_spared: bool) -> None:
        """Count a use by a request; `was_spared` if nothing had to be made for it. Ignored if the handle is gone."""
        with self._writing():
            self._database.execute(
                "UPDATE media SET num_uses = num_uses + 1, num_spared = num_spared + ? WHERE id = ?",
                (was_spared, media_id),
            )

    def hold_pin(self, holder: PinHolder, media_hash: str, seconds: float) -> bool:
        """Record a pin for at least `seconds`, but no longer than its handle; False if the quota is used up.

        Raises UnknownHandleError.
        """
        with self._writing() as now:
            end = now + seconds
            if holder.media_id:
                end = min(end, *self._find_row("expires", *holder, "id"))
            elif holder != ADMINISTRATOR and self._count_other_pins(holder, media_hash) >= self._quota.max_count:
                return False
            self._database.execute(
                "INSERT INTO pins VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET expires = max(expires, excluded.expires)",
                (*holder, media_hash, end),
            )
            return True

    def take_back_pin(self, holder: PinHolder, media_hash: str, former: float | None) -> None:
        """Let the holder's pin end when it did before, or remove it if there was none."""
        with self._writing():
            if former is None:
                self._database.execute(f"DELETE FROM pins {_ITS_PIN}", (*holder, media_hash))
            else:
                self._database.execute(f"UPDATE pins SET expires = ? {_ITS_PIN}", (former, *holder, media_hash))

    def end_all_pins(self, media_hash: str) -> None:
        """Remove the pins of these pixels, whoever holds them."""
        with self._writing():
            self._database.execute("DELETE FROM pins WHERE media_hash = ?", (media_hash,))

    def close(self) -> None:
        self._shared.close()

    def check_invariants(self) -> None:
        with self._writing() as now:
            held = self._database.execute(
                "SELECT count(*), sum(num_bytes), sum(length(content)), min(expires) "
                "FROM media FULL JOIN contents USING (id) GROUP BY tenant"
            ).fetchall()
            pins = self._database.execute(
                "SELECT count(*), min(expires) FROM pins WHERE media_id = '' AND tenant != ? GROUP BY tenant",
                (ADMINISTRATOR.tenant,),
            ).fetchall()
            orphans = self._database.execute(
                "SELECT 1 FROM pins WHERE media_id != '' AND media_id NOT IN (SELECT id FROM media)"
            ).fetchall()
        assert all(count <= self._quota.max_count and first_end > now for count, first_end in pins)
        assert not orphans
        for count, num_bytes, num_held_bytes, first_end in held:
            assert count <= self._quota.max_count
            assert num_bytes == num_held_bytes <= self._quota.max_bytes
            assert first_end > now

    # With the lock held ---------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._shared.alone:
            try:
                yield
            except FAULTS as error:
                raise MediaStoreError("media", f"cannot be kept or read now: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[float]:
        """Remove what has expired, then yield the time inside a transaction that excludes other frontends."""
        with self._reading():
            now = self._clock()
            self._remove_expired(now)
            with self._shared.at_once():
                yield now

    def _remove_expired(self, now: float) -> None:
        """Remove expired rows one per transaction, whose journal takes as much room as everything removed in it."""
        for table in ("pins", "media"):
            rows = self._database.execute(f"SELECT rowid FROM {table} WHERE expires <= ?", (now,)).fetchall()
            for (row,) in rows:  # another frontend may since have extended it or reused its rowid
                self._database.execute(f"DELETE FROM {table} WHERE rowid = ? AND expires <= ?", (row, now))

    def _check_room(self, num_bytes: int) -> None:
        """Refuse an upload that would leave too little room for deleting the largest one."""
        [(largest,)] = self._database.execute("SELECT coalesce(max(num_bytes), 0) FROM media")
        if not self._shared.has_room(num_bytes, largest):
            raise MediaStoreError("media", f"no room for {num_bytes} more bytes")

    def _check_quota(self, tenant: str, num_bytes: int) -> None:
        [(count, num_held_bytes)] = self._database.execute(
            "SELECT count(*), coalesce(sum(num_bytes), 0) FROM media WHERE tenant = ?", (tenant,)
        )
        max_bytes, max_count = self._quota.max_bytes, self._quota.max_count
        if num_held_bytes + num_bytes > max_bytes:
            beside = f"besides the {num_held_bytes} that are stored for you"
            raise MediaQuotaError("media", f"{num_bytes} bytes {beside} would exceed your {max_bytes}")
        if count >= max_count:
            raise MediaQuotaError("media", f"{count} handles are already stored for you, the most allowed")

    def _count_other_pins(self, holder: PinHolder, media_hash: str) -> int:
        query = "SELECT count(*) FROM pins WHERE tenant = ? AND media_id = ? AND media_hash != ?"
        [(count,)] = self._database.execute(query, (*holder, media_hash))
        return int(count)

    def _draw_id(self, created: float) -> str:
        """Return a new id, greater than all others even if the wall clock was set back."""
        [(last,)] = self._database.execute("SELECT max(id) FROM media")
        found = _ID.fullmatch(last or "")
        came = max(int(created * 1e6), int(found[1], 16) + 1 if found else 0)
        return f"{ID_PREFIX}{came:016x}{secrets.token_hex(16)}"

    def _find(self, tenant: str, media_id: str, field: str) -> MediaHandle:
        return MediaHandle(*self._find_row(_COLUMNS, tenant, media_id, field))

    def _find_row(self, columns: str, tenant: str, media_id: str, field: str) -> tuple[Any, ...]:
        """Read columns in a single statement: between two, another frontend may delete the row."""
        if _ID.fullmatch(media_id):
            rows = self._database.execute(
                f"SELECT {columns} FROM media WHERE id = ? AND tenant = ? AND expires > ?",
                (media_id, tenant, self._clock()),
            )
            for row in rows.fetchall():
                return tuple(row)
        raise _unknown(media_id, field)


def _unknown(media_id: str, field: str) -> UnknownHandleError:
    return UnknownHandleError(field, f"no media with the id {media_id[:64]!r} is stored here (any more)")
