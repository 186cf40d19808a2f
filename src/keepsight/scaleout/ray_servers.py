"""Keeps a number of servers running on the nodes of a Ray cluster, and the router's replicas in step with them.

Ray finds the nodes, and starts an actor elsewhere if its node is lost. A server that ends is started again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from keepsight.errors import ServerStartError
from keepsight.scaleout.ray_server import RayServer
from keepsight.scaleout.replicas import Replicas

logger = logging.getLogger(__name__)
# A server that ends so often before it is ready is given up, as an engine is.
MAX_FAILED_STARTS = 3
SECONDS_BETWEEN_STARTS = 1.0


class RayServers:
    def __init__(self, actors: Sequence[Any]) -> None:
        """`actors`: handles of `RayServer`s."""
        self._actors = actors
        self._keepers: list[asyncio.Task[None]] = []
        self._num_given_up = 0

    @property
    def are_given_up(self) -> bool:
        return self._num_given_up == len(self._actors)

    def keep(self, replicas: Replicas, on_given_up: Callable[[], object]) -> None:
        """Start the servers, and again whenever one ends; `on_given_up` is called if none of them can be started."""
        self._keepers = [asyncio.create_task(self._keep(actor, replicas, on_given_up)) for actor in self._actors]

    async def _keep(self, actor: Any, replicas: Replicas, on_given_up: Callable[[], object]) -> None:
        num_failed = 0
        while num_failed < MAX_FAILED_STARTS:
            num_failed = 0 if await _run(actor, replicas) else num_failed + 1
            await asyncio.sleep(SECONDS_BETWEEN_STARTS)
        logger.error("a server ended %d times before it was ready: giving it up", num_failed)
        self._num_given_up += 1
        if self.are_given_up:
            on_given_up()


async def _run(actor: Any, replicas: Replicas) -> bool:
    """Run a server until it ends; return False if it is to blame for never having been ready."""
    replica = None
    try:
        replica = replicas.add(await actor.start.remote())
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


def start_actors(
    number: int, address: str | None, arguments: Sequence[str], variables: Mapping[str, str], num_gpus: int
) -> Sequence[Any]:
    """Connect to the cluster, or start one on this machine; begin to place an actor for each server.

    `address`: the cluster's; None: that of RAY_ADDRESS, or of this machine. `num_gpus`: for each, where there are any.
    """
    try:
        ray.init(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServerStartError(f"--ray: there is no cluster: {_first_line(error)}") from error
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0  # type: ignore[no-untyped-call]
    actor = ray.remote(RayServer).options(
        num_cpus=1,
        num_gpus=num_gpus if has_gpus else 0,
        scheduling_strategy="SPREAD",
        max_restarts=-1,
        # One waits, one may stop it meanwhile.
        max_concurrency=2,
    )
    return [actor.remote(arguments, variables) for _ in range(number)]


def stop_actors(actors: Sequence[Any], seconds: float) -> None:
    """End all servers, each within `seconds`, and leave the cluster."""
    stopping = [actor.stop.remote(seconds) for actor in actors]
    # Actors on lost nodes, and those that never found a place, do not answer.
    ray.wait(stopping, num_returns=len(stopping), timeout=seconds + 5)
    ray.shutdown()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
