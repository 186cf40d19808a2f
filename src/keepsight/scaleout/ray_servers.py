"""Keeps a number of servers running on the nodes of a Ray cluster, and the router's replicas in step with them.

Ray finds the nodes, and starts an actor elsewhere if its node is lost. A server that ends is started again.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from keepsight.errors import InvalidArgumentError, ServerStartError
from keepsight.scaleout.ray_server import GOODBYE_SECONDS, RayServer
from keepsight.scaleout.replicas import Replicas

logger = logging.getLogger(__name__)
# A server that ends so often before it is ready is given up, as an engine is.
MAX_FAILED_STARTS = 3
SECONDS_BETWEEN_STARTS = 1.0
CONNECT_SECONDS = 5.0
# After which the user is told that the cluster has no room for a server.
PLACING_SECONDS = 30.0
# Calls that wait for a server's end, of which some may be left from times when the actor could not be reached. They end
# with the server, and must not keep it from being started or stopped.
MAX_WAITS = 8


class RayServers:
    def __init__(self, actors: Sequence[Any]) -> None:
        """`actors`: handles of `RayServer`s."""
        self._actors = actors
        # Those that have found a place.
        self._placed: list[Any] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._num_given_up = 0

    @property
    def are_given_up(self) -> bool:
        return self._num_given_up == len(self._actors)

    def keep(self, replicas: Replicas, on_given_up: Callable[[], object]) -> None:
        """Start the servers, and again whenever one ends; `on_given_up` is called if none of them can be started."""
        self._keepers = [asyncio.create_task(self._keep(actor, replicas, on_given_up)) for actor in self._actors]

    def stop(self, seconds: float) -> None:
        """End all servers, after their running answers or after `seconds`. Those on lost nodes do not answer."""
        for actor in self._actors:
            if actor not in self._placed:
                ray.kill(actor)
        stopping = [actor.stop.options(concurrency_group="stop").remote(seconds) for actor in self._placed]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=seconds + GOODBYE_SECONDS + 5)

    async def _keep(self, actor: Any, replicas: Replicas, on_given_up: Callable[[], object]) -> None:
        num_failed = 0
        while num_failed < MAX_FAILED_STARTS:
            num_failed = 0 if await self._run(actor, replicas) else num_failed + 1
            await asyncio.sleep(SECONDS_BETWEEN_STARTS)
        logger.error("a server ended %d times before it was ready: giving it up", num_failed)
        self._num_given_up += 1
        if self.are_given_up:
            on_given_up()

    async def _run(self, actor: Any, replicas: Replicas) -> bool:
        """Run a server until it ends; return False if it is to blame for never having been ready."""
        replica = None
        try:
            replica = replicas.add(await self._start(actor))
            logger.warning("%s has ended with exit code %d", replica.address, await actor.wait.remote())
        except ActorUnavailableError as error:
            # Its node is lost, for example: Ray starts another, on a node that has room for it.
            logger.warning("a server's actor is lost: %s", _first_line(error))
            return True
        except RayError as error:
            logger.warning("a server's actor failed: %s", error)  # with all lines: the cause may be the last
        finally:
            if replica is not None:
                await replicas.remove(replica.address)
        return replica is not None and replica.was_ready

    async def _start(self, actor: Any) -> str:
        """Return the server's address, once its actor has found a place."""
        starting = asyncio.ensure_future(actor.start.options(concurrency_group="start").remote())
        if not (await asyncio.wait([starting], timeout=PLACING_SECONDS))[0]:
            logger.warning("the cluster has no room for a server: it is started when there is")
        address: str = await starting
        if actor not in self._placed:
            self._placed.append(actor)
        return address


@contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Connect to a cluster. `address`: None for RAY_ADDRESS's, or that of this machine, begun if need be."""
    _check_address(address)
    try:
        ray.init(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServerStartError(f"--ray: there is no cluster: {_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def place_actors(number: int, arguments: Sequence[str], variables: Mapping[str, str], num_gpus: int) -> Sequence[Any]:
    """Begin to place an actor for each server, with `num_gpus` for each if the cluster has any."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0  # type: ignore[no-untyped-call]
    as_actor: Any = ray.remote
    actor = as_actor(
        num_cpus=1,
        num_gpus=num_gpus if has_gpus else 0,
        scheduling_strategy="SPREAD",
        max_restarts=-1,
        max_concurrency=MAX_WAITS,
        concurrency_groups={"start": 1, "stop": 1},
    )(RayServer)
    return [actor.remote(arguments, variables) for _ in range(number)]


def _check_address(address: str | None) -> None:
    """Raise for an address at which nobody listens: Ray would try for minutes."""
    if address is not None and address.startswith("ray://"):
        raise InvalidArgumentError(
            "--ray-address", "must be that of the cluster itself, as HOST:6379, not of Ray Client"
        )
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InvalidArgumentError("--ray-address", f"cannot connect to {address}: {error}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
