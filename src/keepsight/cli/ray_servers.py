"""The part of `keepsight route` that has Ray start the servers."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keepsight.cli import serve
from keepsight.cli.api_arguments import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from keepsight.cli.one_line_parser import OneLineParser
from keepsight.errors import InvalidArgumentError, ServerStartError

if TYPE_CHECKING:
    from keepsight.scaleout.ray_servers import RayServers

# The router decides these, and speaks TLS itself.
_OWN_FLAGS = (
    *("--host", "--port", "--shutdown-timeout"),
    *("--ssl-certfile", "--ssl-keyfile", "--ssl-keyfile-password"),
)
# Of the router's environment, which the servers get: keys, which should not be in command lines, and the number of
# threads that the user wishes, which would otherwise be Ray's.
_VARIABLES = (KEY_VARIABLE, ADMIN_KEY_VARIABLE, "OMP_NUM_THREADS")


def add_ray_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Ray")
    group.add_argument(
        "--ray", type=int, metavar="N", help="start N servers on the nodes of a Ray cluster (needs the extra 'ray')"
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="the cluster (default: RAY_ADDRESS, or the one on this machine, which is started if there is none)",
    )
    group.add_argument(
        "serve", nargs="*", metavar="-- MODEL FLAG", help="what these servers are told, as `keepsight serve` is"
    )


@contextmanager
def ray_servers(arguments: argparse.Namespace) -> Iterator["RayServers | None"]:
    """Begin to start the servers, and end them on leaving; None without `--ray`."""
    if arguments.ray is None:
        if words := [*arguments.serve, *filter(None, [arguments.ray_address])]:
            raise InvalidArgumentError("--ray", f"is needed if servers are to be started ({' '.join(words)})")
        yield None
        return
    if arguments.ray < 1:
        raise InvalidArgumentError("--ray", f"must be at least 1, not {arguments.ray}")
    num_gpus = _read_serve(arguments.serve).data_parallel_size
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    try:
        from keepsight.scaleout.ray_servers import RayServers, place_actors, ray_cluster
    except ModuleNotFoundError as error:
        raise ServerStartError(f"--ray: {error.name} is not installed (pip install 'keepsight[ray]')") from error
    words = [*arguments.serve, "--shutdown-timeout", str(arguments.shutdown_timeout)]
    with ray_cluster(arguments.ray_address):
        servers = RayServers(place_actors(arguments.ray, words, variables, num_gpus))
        try:
            yield servers
        finally:
            servers.stop(arguments.shutdown_timeout)


def _read_serve(words: Sequence[str]) -> argparse.Namespace:
    """Refuse what `serve` would refuse for its form: here in one line, and not once on each node."""
    for word in words:
        if (flag := word.partition("=")[0]) in _OWN_FLAGS:
            raise InvalidArgumentError(flag, "is the router's: put it before the `--`")
    parser = OneLineParser(prog="keepsight route --ray N --")
    serve.add_arguments(parser)
    return parser.parse_args(words)
