"""uvicorn, hardened for the open internet: no client can hold a connection by being slow.

The headers of a request are limited in time and size, and a client that does not read its answer is cut off
(`slow_client_limits`). (`read_body` limits bodies.)
"""

import logging
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from keepsight.api_settings import ApiSettings
from keepsight.certificate import Certificate
from keepsight.frontend.http.direct_body_protocol import DirectBodyProtocol
from keepsight.frontend.http.fair_accept import FairAcceptServer
from keepsight.frontend.http.slow_client_limits import SlowClientLimits

# Clients keep an idle connection for 5 seconds to a minute, load balancers for a minute. The side that sends requests
# has to close it, or a request meets a connection that was just closed, and is lost. uvicorn's default of 5 seconds
# equals httpx's.
IDLE_SECONDS = 75
# Messages that strangers could fill the log with.
SUPPRESSED_LOG_MESSAGES = frozenset(
    {
        # asyncio (and uvloop) log these for each write, from the sixth on, between a client's disconnect and their
        # report of it: an answer with many choices writes more than five times.
        "SSL connection is closed",
        "socket.send() raised exception.",
        # uvicorn's, of whatever speaks another protocol.
        "Invalid HTTP request received.",
    }
)


def make_server(app: ASGIApp, settings: ApiSettings, on_refused: Callable[[], object] = bool) -> FairAcceptServer:
    """Create the server. `on_refused` is called for each 4xx that the app does not see."""
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(_is_not_suppressed)
    base = DirectBodyProtocol if hasattr(AutoHTTPProtocol, "on_body") else SlowClientLimits
    terms = {"patience_seconds": settings.slow_client_seconds, "on_refused": staticmethod(on_refused)}
    protocol = type("Protocol", (base, AutoHTTPProtocol), terms)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        root_path=settings.root_path,
    )
    server = FairAcceptServer(config)
    server.certificate = None if settings.ssl_certfile is None else Certificate(settings)
    server.handshake_seconds = settings.slow_client_seconds
    return server


def _is_not_suppressed(record: logging.LogRecord) -> bool:
    return record.msg not in SUPPRESSED_LOG_MESSAGES
