"""The address of a server that speaks the Redis protocol, parsed from its URL."""

from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from keepsight.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class RedisAddress:
    host: str
    port: int
    path: str | None = None  # of a unix socket
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    is_tls: bool = False

    def __str__(self) -> str:
        """Return the address without credentials, which must not be in logs."""
        return self.path or f"{self.host}:{self.port}/{self.database}"


def parse_address(url: str, field: str = "redis") -> RedisAddress:
    """Parse redis://user:password@host:port/database, rediss:// for TLS, or unix:///path?db=0."""
    parts = _split(url, field)
    named = parse_qs(parts.query, keep_blank_values=True)
    if parts.fragment or named.keys() - ({"db"} if parts.scheme == "unix" else set()):
        raise InvalidArgumentError(field, "only ?db= of a unix socket may follow the address")
    try:
        port = parts.port
        database = named.get("db", [""])[0] if parts.scheme == "unix" else parts.path.strip("/")
        number = int(database or 0)
    except ValueError:
        raise InvalidArgumentError(field, "port and database must be numbers") from None
    if number < 0:
        raise InvalidArgumentError(field, f"the database must be at least 0, not {number}")
    return RedisAddress(
        host=parts.hostname or "localhost",
        port=port or 6379,
        path=unquote(parts.path) if parts.scheme == "unix" else None,
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        database=number,
        is_tls=parts.scheme == "rediss",
    )


def _split(url: str, field: str) -> SplitResult:
    # Python's own error message may contain the password.
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("redis", "rediss") or (parts.scheme == "unix" and parts.path):
            return parts
    raise InvalidArgumentError(field, "must be redis://, rediss:// or unix:// with an address")
