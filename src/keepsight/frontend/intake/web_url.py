"""Parses a client's URL once and strictly, so that the host that is checked is the one that is connected to.

Knows nothing of networks. Anything that two parsers might read differently (spaces, backslashes, credentials) is
refused.
"""

import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from keepsight.errors import MediaRefusedError, MediaTimeoutError, PictureError

MAX_LENGTH = 4096
DEFAULT_PORTS = {"http": 80, "https": 443}
# Lower ports belong to other protocols (mail, shells, file shares), to which no HTTP must be sent.
LEAST_FREE_PORT = 1024
_HOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]*:[0-9a-f:.]*")
_AMBIGUOUS = re.compile(r"[\x00-\x20\x7f\\]")
_KEPT_IN_TARGET = "%/:;=&?~+!$,'@()*[]|"


class UrlFault(Exception):  # noqa: N818 (it is none of the errors that callers see, but becomes one)
    """A fault of a URL or of its download. Each request that asked for the URL reports it under its own field."""

    def __init__(self, error: type[PictureError], message: str) -> None:
        super().__init__(message)
        self._error, self._message = error, message

    @property
    def is_timeout(self) -> bool:
        return issubclass(self._error, MediaTimeoutError)

    def under(self, field: str) -> PictureError:
        return self._error(field, self._message)


@dataclass(frozen=True, slots=True)
class WebUrl:
    scheme: str
    # ASCII, in lower case, without a trailing dot.
    host: str
    port: int
    # Path and query, as sent.
    target: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"

    def join(self, location: str) -> "WebUrl":
        """Return the URL to which a redirect leads. Spaces in it are quoted, as browsers do, not in its host."""
        location = location.replace(" ", "%20")
        if _AMBIGUOUS.search(location):
            raise _refusal("redirects to something that is not a URL: it has a control character or a backslash")
        try:
            return parse_web_url(urljoin(str(self), location))
        except ValueError as error:
            raise _refusal("redirects to something that is not a URL") from error


def parse_web_url(text: str) -> WebUrl:
    """Parse a URL; raise UrlFault if it may not be fetched."""
    if len(text) > MAX_LENGTH:
        raise _refusal(f"a URL of {len(text)} characters is too long, at most {MAX_LENGTH} are allowed")
    if _AMBIGUOUS.search(text):
        raise _refusal("a URL has no spaces, control characters or backslashes: they must be percent-encoded")
    try:
        return _split(text)
    except ValueError as error:  # from urllib, or for characters that no URL may have
        raise _refusal(f"is not a URL that can be fetched: {error}") from error


def _split(text: str) -> WebUrl:
    parts = urlsplit(text)
    if parts.scheme not in DEFAULT_PORTS:
        raise _refusal(f"{parts.scheme[:20]}: URLs are not fetched, only http: and https:")
    if "@" in parts.netloc:
        raise _refusal("a URL with a user name or password is not fetched")
    port = DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    if port not in DEFAULT_PORTS.values() and port < LEAST_FREE_PORT:
        raise _refusal(f"port {port} is not allowed: 80, 443 and those from {LEAST_FREE_PORT} on are")
    query = f"?{_quote(parts.query)}" if parts.query else ""
    return WebUrl(parts.scheme, to_ascii_host(parts.hostname or ""), port, (_quote(parts.path) or "/") + query)


def to_ascii_host(host: str) -> str:
    """Return the spelling by which hosts are compared; raise ValueError if there is none."""
    ascii_host = host if ":" in host else host.removesuffix(".").encode("idna").decode().lower()
    if not _HOST.fullmatch(ascii_host):
        raise ValueError(f"{host[:80]!r} is not a host")
    return ascii_host


def _quote(part: str) -> str:
    return quote(part, safe=_KEPT_IN_TARGET, errors="surrogateescape")


def _refusal(message: str) -> UrlFault:
    return UrlFault(MediaRefusedError, message)
