"""Operator settings for the HTTP side of a server. Validated by the command that parses them; never printed."""

from collections.abc import Mapping
from typing import Literal

import msgspec


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    # Further names by which requests may call the model.
    more_model_names: tuple[str, ...] = ()
    # By adapter name: the name of its base model, if a different one is to be reported.
    adapter_parents: Mapping[str, str] = {}
    # None: any client may send requests, and only clients on the server's own machine may administer it.
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None
    # Whether callers with different keys share caches.
    cache_isolation: Literal["none", "api-key"] = "none"

    # Web pages from these origins may send requests; "*": from any.
    allowed_origins: tuple[str, ...] = ()
    # The path prefix that a proxy strips before it forwards a request.
    root_path: str = ""
    # Where trace spans of requests are sent, as OTLP over HTTP.
    otlp_traces_endpoint: str | None = None
    # Whether administrators may see cached pictures.
    dashboard_thumbnails: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    log_requests: bool = True

    max_body_bytes: int = 100 * 2**20
    # Whether a request may choose its pictures' number of crops and how they are resized.
    trust_request_mm_processor_kwargs: bool = False
    # Per frontend: requests for which no part of the answer has been sent yet.
    max_waiting_requests: int = 1024
    # Quota of uploaded pictures (to be named by later requests) for each API key.
    media_quota_bytes: int = 256 * 2**20
    media_quota_count: int = 1000
    # Quota of stored responses (to be continued by later requests) for each API key.
    response_quota_bytes: int = 64 * 2**20
    # Timeout in seconds for a request's headers, and for a client's pauses while it sends or receives.
    slow_client_seconds: float = 30.0

    @property
    def scheme(self) -> Literal["http", "https"]:
        return "http" if self.ssl_certfile is None else "https"

    def __repr__(self) -> str:
        """Omit the keys: this may end up in a log."""
        return f"{type(self).__name__}(...)"
