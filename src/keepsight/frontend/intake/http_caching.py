"""Reads an origin's caching headers: for how long a response is fresh, and how to revalidate it.

Only explicit directives count: a response without max-age is revalidated each time. No credentials and no cookies are
ever sent, and always the same headers, so `private` and `Vary` change nothing, except that `Vary: *` is never fresh.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Headers = Sequence[tuple[bytes, bytes]]  # names in any case
# Longer validators are not worth keeping.
MAX_VALIDATOR_LENGTH = 1024
MAX_SECONDS = 2**31


@dataclass(frozen=True, slots=True)
class Freshness:
    seconds: float
    may_be_kept: bool = True

    def at_most(self, other: "Freshness") -> "Freshness":
        """Return the freshness of a chain of redirects, from those of its responses."""
        return Freshness(min(self.seconds, other.seconds), self.may_be_kept and other.may_be_kept)


@dataclass(frozen=True, slots=True)
class Validators:
    """The origin's identifiers of a version. They belong to the URL that sent them, not to one before a redirect."""

    url: str
    etag: str | None
    last_modified: str | None

    def as_headers(self) -> list[tuple[bytes, bytes]]:
        named = ((b"If-None-Match", self.etag), (b"If-Modified-Since", self.last_modified))
        return [(name, value.encode("latin-1")) for name, value in named if value is not None]

    def updated_by(self, later: "Validators") -> "Validators":
        """Return these validators, updated from a 304 response, which need not repeat them."""
        return Validators(self.url, later.etag or self.etag, later.last_modified or self.last_modified)


def find_header(headers: Headers, name: str) -> str | None:
    """Return all lines of the header, joined as RFC 9110 allows; None if there is none."""
    wanted = name.encode()
    lines = [value.decode("latin-1").strip() for key, value in headers if key.lower() == wanted]
    return ", ".join(lines) if lines else None


def read_validators(headers: Headers, url: str) -> Validators:
    etag, last_modified = (_short(find_header(headers, name)) for name in ("etag", "last-modified"))
    return Validators(url, etag, last_modified)


def read_freshness(headers: Headers) -> Freshness:
    directives = _read_directives(find_header(headers, "cache-control") or "")
    may_be_kept = "no-store" not in directives
    is_never_fresh = "no-cache" in directives or "*" in _read_directives(find_header(headers, "vary") or "")
    max_age = None if is_never_fresh else _read_seconds(directives.get("max-age", ""))
    age = _read_seconds(find_header(headers, "age") or "0")
    seconds = 0 if max_age is None or age is None else max(0, max_age - age)
    return Freshness(seconds, may_be_kept)


def _read_directives(text: str) -> dict[str, str]:
    """Return the first directive of each name: a second one could only contradict it."""
    directives: dict[str, str] = {}
    for each in text.split(","):
        name, _, value = each.strip().partition("=")
        directives.setdefault(name.strip().lower(), value.strip().strip('"'))
    return directives


def _read_seconds(text: str) -> int | None:
    """Return None if this is no number of seconds."""
    if not text.isascii() or not text.isdigit():
        return None
    return MAX_SECONDS if len(text) > 10 else min(int(text), MAX_SECONDS)


def _short(value: str | None) -> str | None:
    return value if value is not None and len(value) <= MAX_VALIDATOR_LENGTH else None
