"""Fuzz the HTTP server with any number of connections:  python -m tests.frontend.http.long_fuzz --sessions 5000

A session for each mechanism is played first. Each drawn one sends valid requests and at most one invalid thing behind
them, in pieces, and may leave at any byte. Every valid request has to get its own answer, whole and in order, what is
invalid one 4xx; the connection has to end regularly, over TLS too, and nothing may be left or logged.
"""

import argparse
import time
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepsight.frontend.http import http_server
from tests.frontend.http.fuzz_server import FuzzedServer, fuzz

SERVERS: dict[str, dict[str, Any]] = {
    "asyncio": {},
    "uvloop": {"loop": "uvloop"},
    "h11": {"has_h11": True},
    "TLS, asyncio": {"is_tls": True},
    "TLS, uvloop": {"is_tls": True, "loop": "uvloop"},
    "TLS, h11": {"is_tls": True, "has_h11": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000, help="for each of the servers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name, options in SERVERS.items():
        http_server.AutoHTTPProtocol = H11Protocol if "has_h11" in options else AutoHTTPProtocol  # type: ignore[attr-defined]
        began = time.monotonic()
        counts = fuzz(FuzzedServer(**options), args.seed, range(args.sessions))
        print(f"{name}: {dict(counts)}, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
