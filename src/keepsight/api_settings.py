"""What an operator says of the HTTP side of a server.  The command that reads it checks it; nobody prints it."""

from collections.abc import Mapping
from typing import Literal

import msgspec


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    # Beside the one that answers call it by.
    more_model_names: tuple[str, ...] = ()
    # Of adapters: the model's name, where it is to be told as another.
    adapter_parents: Mapping[str, str] = {}
    # None: whoever reaches the server may ask it, and whoever asks from its own machine may administer it.
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None
    # Whether callers of different keys share caches.
    cache_isolation: Literal["none", "api-key"] = "none"

    # Web pages of these origins may ask; "*": of all.
    allowed_origins: tuple[str, ...] = ()
    # The path that a proxy takes away before it passes a request on.
    root_path: str = ""
    # Where spans of requests are sent, by OTLP over HTTP.
    otlp_traces_endpoint: str | None = None
    # Administrators may see the pictures that are held.
    dashboard_thumbnails: bool = False
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    log_requests: bool = True

    max_body_bytes: int = 100 * 2**20
    # Whether a request may choose how many crops its pictures become and how they are resized.
    trust_request_mm_processor_kwargs: bool = False
    # Of one frontend: those of whose answer nothing has been sent.
    max_waiting_requests: int = 1024
    # Of the pictures that callers of one key may upload to be named later.
    media_quota_bytes: int = 256 * 2**20
    media_quota_count: int = 1000
    # Of the responses of callers of one key that later requests may go on from.
    response_quota_bytes: int = 64 * 2**20
    # Seconds that a request's headers may take, and that a client may pause while it sends or is sent something.
    slow_client_seconds: float = 30.0

    @property
    def scheme(self) -> Literal["http", "https"]:
        return "http" if self.ssl_certfile is None else "https"

    def __repr__(self) -> str:
        """Without the keys: this may end up in a log."""
        return f"{type(self).__name__}(...)"
