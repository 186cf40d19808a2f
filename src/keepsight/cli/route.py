"""`keepsight route`: put one address before several servers (replicas), which run already or which Ray starts."""

import argparse
import logging
import re
import signal
import socket
from collections.abc import Sequence
from functools import partial
from types import FrameType

from keepsight.authorities import report_unreadable_authorities
from keepsight.bench.address import Address
from keepsight.cli.api_arguments import add_body_arguments, add_tls_arguments, router_settings_from
from keepsight.cli.check_arguments import check_arguments_are_text, check_minimums
from keepsight.cli.listen import add_address, add_shutdown_timeout, allow_many_open_files, listen
from keepsight.cli.ray_servers import add_ray_arguments, ray_servers
from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.fair_accept import FairAcceptServer
from keepsight.ipc.server_log import begin_log
from keepsight.ipc.take_signals import INTERRUPTED, REQUESTS_TO_END
from keepsight.scaleout.replicas import Replicas
from keepsight.scaleout.router_server import make_router
from keepsight.supervisor import url_of

FLAG = "--replica"
_EXAMPLE = "http://10.0.0.1:8000"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Of names in ASCII, IPv4 and IPv6.
_HOST = re.compile(r"[\w.:%-]+", re.ASCII)

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        FLAG,
        action="append",
        default=[],
        metavar="URL",
        help=f"address of a server (`keepsight serve`), such as {_EXAMPLE}; repeat it for each",
    )
    add_address(parser)
    add_shutdown_timeout(parser, "router")
    group = parser.add_argument_group("HTTP")
    add_tls_arguments(group)
    add_body_arguments(group)
    add_ray_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    begin_log()
    check_arguments_are_text(arguments)
    check_minimums(arguments, {"shutdown_timeout": 0})
    replicas = [_read_replica(url) for url in arguments.replica]
    _check_replicas(replicas, is_ray=arguments.ray is not None)
    settings = router_settings_from(arguments)
    allow_many_open_files()
    if any(each.is_secure for each in replicas):
        report_unreadable_authorities()
    with listen(arguments.host, arguments.port) as listener:
        host, port = listener.getsockname()[:2]
        _refuse_itself(replicas, host, port)
        with ray_servers(arguments) as started:

            def start(known: Replicas) -> None:
                for each in replicas:
                    known.add(each.url)
                if started is not None:
                    started.keep(known, on_given_up=partial(setattr, server, "should_exit", True))

            server = make_router(start, settings, arguments.shutdown_timeout)
            names = ", ".join(each.url for each in replicas) or f"servers that Ray starts ({arguments.ray})"
            logger.info("%s leads to %s", url_of(settings.scheme, *listener.getsockname()), names)
            status = _run_until_signal(server, listener)
            return 1 if started is not None and started.are_given_up else status


def _read_replica(url: str) -> Address:
    address = Address.parse(url, FLAG, _EXAMPLE)
    if address.path:
        raise InvalidArgumentError(FLAG, f"must not have a path, as requests bring their own: {url!r}")
    if not _HOST.fullmatch(address.host):
        raise InvalidArgumentError(FLAG, f"{address.host!r} is no name of a host")
    return address


def _check_replicas(replicas: Sequence[Address], is_ray: bool) -> None:
    if is_ray and replicas:
        raise InvalidArgumentError(FLAG, "cannot be given with --ray, which starts the servers itself")
    if not is_ray and not replicas:
        raise InvalidArgumentError(FLAG, f"is needed: the address of a server, such as {_EXAMPLE} (or --ray)")
    for number, each in enumerate(replicas):
        if each in replicas[:number]:
            raise InvalidArgumentError(FLAG, f"{each.url} is given twice")


def _refuse_itself(replicas: Sequence[Address], host: str, port: int) -> None:
    """Refuse the address that the router listens on, by the names that are known without asking anybody."""
    own_hosts = {host, *_LOOPBACK} if host in (*_LOOPBACK, "0.0.0.0", "::") else {host}
    for each in replicas:
        if each.port == port and each.host in own_hosts:
            raise InvalidArgumentError(FLAG, f"{each.url} is the router's own address")


def _run_until_signal(server: FairAcceptServer, listener: socket.socket) -> int:
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        server.handle_exit(number, frame)

    for number in REQUESTS_TO_END:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, end)
    # It handles SIGTERM and SIGINT itself, and raises them again once it has ended.
    server.run(sockets=[listener])
    # Whoever sends another does not want to wait for the rest.
    for number in REQUESTS_TO_END:
        if signal.getsignal(number) == end:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    return INTERRUPTED if signal.SIGINT in received else 0
