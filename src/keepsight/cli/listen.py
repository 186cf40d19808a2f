"""Opens the socket that a server listens on, and raises its limit on open files: each connection is one."""

import argparse
import errno
import resource
import socket
from contextlib import suppress

from keepsight.errors import InvalidArgumentError, ServerStartError

# A frontend has half as many open before the first client connects.
LEAST_OPEN_FILES = 64


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, :: for all (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one (default: 8000)")


def add_shutdown_timeout(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help=f"seconds for running answers to finish when the {what} shuts down (default: 30)",
    )


def allow_many_open_files() -> None:
    """Raise the limit on open files as far as possible, for child processes too: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < LEAST_OPEN_FILES:
        needed = f"a server needs {LEAST_OPEN_FILES}, and one more for each connection"
        raise ServerStartError(f"only {most} files may be open (`ulimit -n`): {needed}")
    # Some systems report no limit although there is one.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise InvalidArgumentError("--port", f"must be from 0 to 65535, not {port}")
    if host == "*":  # glibc finds all addresses by this name, other systems none
        raise InvalidArgumentError("--host", "'*' is not an address: :: or 0.0.0.0 means all")
    if host[:1] + host[-1:] == "[]":  # as an IPv6 address stands in URLs, also in the one that is logged
        host = host[1:-1]
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidArgumentError("--host", f"{host!r} is not an address of this machine: {error}") from error
    # With the network interface's number, for an address like fe80::1%eth0.
    family, _, _, _, address = found[0]
    try:
        # "::" means all addresses, including IPv4's, as with other servers.
        takes_both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=takes_both)
    except OSError as error:
        # The port is in use, or it is below 1024 and reserved for root.
        at_fault = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        is_ipv6_only = error.errno == errno.EADDRNOTAVAIL and str(address[0]).startswith("127.")
        hint = " (on a machine without IPv4: --host ::1)" if is_ipv6_only else ""
        raise InvalidArgumentError(at_fault, f"cannot listen on {host}:{port}: {error.strerror}{hint}") from error
