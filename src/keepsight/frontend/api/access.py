"""Access control: API keys, the administrator's key, and what an API key isolates: caches and tenants.

Every path needs a key unless it is listed as open, so that a new path is never open by mistake.
"""

import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from keepsight.api_settings import ApiSettings
from keepsight.errors import AccessError, ForbiddenError, NoSuchPathError
from keepsight.frontend.api.serve_page import PAGE_FILES
from keepsight.frontend.http.error_response import error_response
from keepsight.frontend.http.shown_key import key_in, shown_key

logger = logging.getLogger(__name__)
# Paths that reveal nothing about any client: for load balancers, and for people learning how to use the API.
OPEN_PATHS = frozenset({*PAGE_FILES, "/health", "/ready", "/version", "/openapi.json"})
ADMIN_PATHS = frozenset({"/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache"})
ADMIN_PREFIX = "/debug/"
METRICS_PATH = "/metrics"
# The router takes a path with a line break at its end for the one without: its patterns end with `$`.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Access:
    """ASGI middleware that checks the caller's key and stores it in the request's state."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self._app, self._keys, self._watching_keys = app, settings.api_keys, _watching_keys(settings)
        self._admin_keys, self._allowed_origins = _admin_keys(settings), settings.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["api_key"] = self._admit(scope)
            except AccessError as error:
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> str | None:
        """Return the caller's key; None if none is required. Raises AccessError if the caller is not admitted."""
        path = path_within(scope)
        if _CONTROL_CHARACTER.search(path):
            raise NoSuchPathError("no path of this server has control characters", "no_such_path")
        # A slash too many at the end is only redirected, which reveals no more.
        if path in OPEN_PATHS or path.removesuffix("/") in OPEN_PATHS:
            return None
        headers = Headers(scope=scope)
        if is_for_admins(path) and self._admin_keys:
            return _find_key(key_in(headers), self._admin_keys, "the administrator's key")
        if is_for_admins(path) and not _is_local(scope, headers):
            message = "only requests from the server's own machine may do this, as it has no admin key"
            raise ForbiddenError(message, "admin_only")
        if keys := self._watching_keys if path == METRICS_PATH else self._keys:
            return _find_key(shown_key(scope), keys)
        self._check_origin(headers)
        return None

    def _check_origin(self, headers: Headers) -> None:
        """Refuse foreign web pages where no key is required.

        Browsers let any page send whatever a form could, but they state the page's origin.
        """
        origin, allowed = headers.get("origin"), self._allowed_origins
        # A proxy may have changed the host. A page cannot set these headers itself: that would need a CORS preflight.
        is_behind_proxy = any(_names_one_host(origin, host) for host in _forwarded_hosts(headers))
        if _is_of_own_page(headers) or is_behind_proxy or headers.get("sec-fetch-site") == "same-origin":
            return
        if origin not in allowed and "*" not in allowed:
            message = f"a web page of {origin!r:.80} is not allowed: --allowed-origins lists those that are"
            raise ForbiddenError(message, "origin_not_allowed")


def path_within(scope: Scope) -> str:
    """Return the path without `root_path`, which a proxy strips and the HTTP server prepends again."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_for_admins(path: str) -> bool:
    return path in ADMIN_PATHS or path.startswith(ADMIN_PREFIX)


def may_watch(settings: ApiSettings, http: Request) -> bool:
    """Return whether the sender of this request, possibly on an open path, may see statistics of all callers."""
    try:
        return not (keys := _watching_keys(settings)) or bool(_find_key(key_in(http.headers), keys))
    except AccessError:
        return False


def _watching_keys(settings: ApiSettings) -> tuple[str, ...]:
    """Return the keys that may read metrics; empty: everybody may, as everybody may send requests.

    The administrator's key is one of them, though it need not be able to send requests.
    """
    return (*settings.api_keys, *_admin_keys(settings)) if settings.api_keys else ()


def _admin_keys(settings: ApiSettings) -> tuple[str, ...]:
    return () if settings.admin_api_key is None else (settings.admin_api_key,)


def isolate_salt(settings: ApiSettings, http: Request, cache_salt: str | None) -> str | None:
    """Return the cache salt to use for a caller's request. No caller can produce another caller's salt."""
    if settings.cache_isolation == "none":
        return cache_salt
    key = http.state.api_key
    assert key is not None, "isolated callers have keys"
    # An empty salt is invalid; it is refused later.
    salt = b"" if cache_salt is None else b"salt:" + cache_salt.encode(errors="surrogatepass")
    return cache_salt if cache_salt == "" else hmac.digest(key.encode(), salt, "sha256").hex()


def tenant_of(http: Request) -> str:
    """Return the caller's tenant: a digest of its API key, as the key itself must not be written anywhere."""
    key = getattr(http.state, "api_key", None)
    return "" if key is None else _digest(key).hex()


def _find_key(shown: str, keys: Sequence[str], wanted: str = "an API key") -> str:
    if not shown:
        raise AccessError(f"{wanted} is needed: Authorization: Bearer KEY", "missing_api_key")
    digest = _digest(shown)
    # All keys are compared, by digests of one length, so that the time taken reveals nothing about any key.
    matching = [key for key in keys if hmac.compare_digest(_digest(key), digest)]
    if not matching:
        raise AccessError(f"{wanted} is needed: the one given is unknown", "invalid_api_key")
    return matching[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Return whether a request comes from this machine, neither through a proxy nor from a foreign web page open on it.

    Such a page may have its own host name resolve to this machine (DNS rebinding), which makes its requests
    same-origin: so the host name is checked too.
    """
    if any(name in headers for name in ("forwarded", "x-forwarded-for", "via")):
        return False
    caller = (scope.get("client") or ("",))[0]
    return _is_of_own_page(headers) and _is_loopback(caller) and _is_loopback(_host_name(headers.get("host", "")))


def _is_of_own_page(headers: Headers) -> bool:
    """Return whether the request comes from a page of this server, or from no page at all."""
    origin = headers.get("origin")
    return origin is None or _names_one_host(origin, headers.get("host"))


def _forwarded_hosts(headers: Headers) -> Sequence[str]:
    """Return the host that a proxy (of several, the first) was asked for, also with a port that is stated apart."""
    names = "x-forwarded-host", "x-forwarded-port"
    host, port = (headers.get(name, "").partition(",")[0].strip() for name in names)
    return (host, f"{host}:{port}") if host else ()


def _names_one_host(origin: str | None, host: str | None) -> bool:
    """Return whether an origin has this host. Either may leave out the scheme's default port."""
    scheme, mark, own = (origin or "").lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(mark) and host is not None and own.removesuffix(port) == host.lower().removesuffix(port)


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    # A dual-stack socket reports IPv4 addresses as IPv4-mapped IPv6.
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (inner or address).is_loopback
