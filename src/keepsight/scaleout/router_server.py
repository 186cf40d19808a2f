"""The HTTP server of the router, with the limits that servers themselves have for slow clients."""

import logging
from collections.abc import Callable
from functools import partial

from keepsight.api_settings import ApiSettings
from keepsight.frontend.http.fair_accept import FairAcceptServer
from keepsight.frontend.http.http_server import make_server
from keepsight.scaleout.replicas import Replicas
from keepsight.scaleout.router_app import Router

# uvicorn's complaint about an answer without an end. Those are cut on purpose, which is logged.
CUT = "ASGI callable returned without completing response."


def make_router(start: Callable[[Replicas], None], settings: ApiSettings, shutdown_seconds: float) -> FairAcceptServer:
    """`start`: adds the replicas; called on the event loop."""
    logging.getLogger("uvicorn.error").addFilter(_is_no_cut)
    replicas = Replicas()
    server = make_server(Router(replicas, settings), settings)
    server.config.timeout_graceful_shutdown = shutdown_seconds  # type: ignore[assignment]  # parts of seconds will do
    server.on_accepting = partial(start, replicas)
    return server


def _is_no_cut(record: logging.LogRecord) -> bool:
    return record.msg != CUT
