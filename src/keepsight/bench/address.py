"""The address of an OpenAI server, parsed from its URL."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from keepsight.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    path: str
    is_secure: bool

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.authority}{self.path}"

    @classmethod
    def parse(cls, url: str, field: str = "--base-url", example: str = "http://127.0.0.1:8000/v1") -> "Address":
        """Parse a URL. `field` is the flag that errors name, `example` what they propose."""
        try:
            parts = urlsplit(url.rstrip("/"))
            port = parts.port
        except ValueError as error:
            raise InvalidArgumentError(field, f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgumentError(field, f"must be like {example}, not {url!r}")
        extras = {"credentials": "@" in parts.netloc, "a query": parts.query, "a fragment": parts.fragment}
        if given := [name for name, is_there in extras.items() if is_there]:
            # Not shown: they may be secrets.
            raise InvalidArgumentError(field, f"must not contain {' or '.join(given)}: no request would carry it")
        is_secure = parts.scheme == "https"
        usual = 443 if is_secure else 80
        return cls(parts.hostname, usual if port is None else port, parts.path, is_secure)
