"""The HTTP server of the router, with the limits that servers themselves have for slow clients."""

from collections.abc import Sequence

from keepsight.api_settings import ApiSettings
from keepsight.frontend.http.fair_accept import FairAcceptServer
from keepsight.frontend.http.http_server import make_server
from keepsight.scaleout.replicas import Replicas
from keepsight.scaleout.router_app import Router


def make_router(addresses: Sequence[str], settings: ApiSettings, shutdown_seconds: float = 30.0) -> FairAcceptServer:
    """`addresses`: of the first replicas."""
    replicas = Replicas()
    server = make_server(Router(replicas, settings), settings)
    server.config.timeout_graceful_shutdown = shutdown_seconds  # type: ignore[assignment]  # parts of seconds will do

    def start() -> None:
        for address in addresses:
            replicas.add(address)

    server.on_accepting = start
    return server
