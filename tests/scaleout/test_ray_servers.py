"""Servers that Ray keeps running, with actors of our own; `tests/cli/test_route_with_ray.py` has real ones."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

from ray.exceptions import ActorUnavailableError, RayTaskError

from keepsight.errors import InvalidArgumentError
from keepsight.scaleout import ray_servers
from keepsight.scaleout.ray_servers import RayServers, place_actors, ray_cluster
from keepsight.scaleout.replicas import Replicas


class Method:
    """A method of an actor: each call returns or raises the next of its results; without any left, it waits."""

    def __init__(self, *results: object) -> None:
        self._results = list(results)

    def options(self, **_: object) -> "Method":
        return self

    async def remote(self) -> object:
        if not self._results:
            await asyncio.Event().wait()
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


class Actor:
    def __init__(self, addresses: list[object], ends: list[object]) -> None:
        self.start, self.wait = Method(*addresses), Method(*ends)


class KnownReplicas(Replicas):
    """Of which each is ready as soon as it is known, or never; `story` has what was done with them."""

    def __init__(self, *, are_ready: bool) -> None:
        super().__init__()
        self._are_ready = are_ready
        self.story: list[str] = []

    def add(self, address: str) -> Any:
        self.story.append(f"add {address}")
        replica = super().add(address)
        replica.was_ready = self._are_ready
        return replica

    async def remove(self, address: str) -> None:
        self.story.append(f"remove {address}")
        await super().remove(address)


def lost() -> ActorUnavailableError:
    return ActorUnavailableError("its node is lost", b"\0" * 16)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_servers, "SECONDS_BETWEEN_STARTS", 0)


def run(
    actors: list[Actor], until: Callable[[KnownReplicas, RayServers], bool], *, are_ready: bool = True
) -> tuple[list[str], bool]:
    """Keep the servers until something is true; return what was done with replicas, and whether all were given up."""

    async def keep() -> tuple[list[str], bool]:
        servers, replicas, given_up = RayServers(actors), KnownReplicas(are_ready=are_ready), asyncio.Event()
        servers.keep(replicas, given_up.set)
        async with asyncio.timeout(20):
            while not until(replicas, servers):
                await asyncio.sleep(0)
        story = list(replicas.story)
        await _settle(servers, replicas)
        assert servers.are_given_up == given_up.is_set()
        return story, given_up.is_set()

    return asyncio.run(keep())


async def _settle(servers: RayServers, replicas: Replicas) -> None:
    for keeper in servers._keepers:
        keeper.cancel()
    await asyncio.gather(*servers._keepers, return_exceptions=True)
    ends: list[Awaitable[None]] = [replicas.remove(each.address) for each in list(replicas.all)]
    await asyncio.gather(*ends)


def test_each_server_is_a_replica_while_it_runs() -> None:
    actors = [Actor(["http://a:1"], []), Actor(["http://b:1"], [])]
    story, _ = run(actors, lambda replicas, _: len(replicas.all) == 2)
    assert story == ["add http://a:1", "add http://b:1"]


def test_a_server_that_ends_is_started_again_however_often() -> None:
    addresses: list[object] = [f"http://a:{port}" for port in range(1, 7)]
    story, is_given_up = run([Actor(addresses, [1] * 5)], lambda replicas, _: len(replicas.story) == 11)
    assert story[:4] == ["add http://a:1", "remove http://a:1", "add http://a:2", "remove http://a:2"]
    assert not is_given_up


def test_servers_that_end_three_times_before_they_are_ready_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    actors = [Actor([f"http://{host}:1"] * 9, [2] * 9) for host in "ab"]
    story, is_given_up = run(actors, lambda _, servers: servers.are_given_up, are_ready=False)
    assert is_given_up
    assert story.count("add http://a:1") == story.count("remove http://a:1") == 3
    assert caplog.text.count("http://a:1 has ended with exit code 2") == 3


def test_the_others_serve_on_when_one_is_given_up() -> None:
    actors = [Actor(["http://a:1"] * 3, [2] * 3), Actor(["http://b:1"], [])]
    story, is_given_up = run(
        actors, lambda replicas, _: replicas.story.count("remove http://a:1") == 3, are_ready=False
    )
    assert not is_given_up
    assert "remove http://b:1" not in story


def test_an_actor_that_ray_starts_elsewhere_is_no_failed_start() -> None:
    actor = Actor([lost(), lost(), "http://a:1", lost(), "http://b:1"], [lost()])
    story, _ = run([actor], lambda replicas, _: "add http://b:1" in replicas.story, are_ready=False)
    assert story == ["add http://a:1", "remove http://a:1", "add http://b:1"]


def test_an_actor_that_fails_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    failure = RayTaskError("start", "No module", ImportError("keepsight"))  # type: ignore[no-untyped-call]
    story, is_given_up = run([Actor([failure] * 3, [])], lambda _, servers: servers.are_given_up)
    assert (story, is_given_up) == ([], True)
    assert "a server's actor failed: " in caplog.text


def test_calls_that_are_left_waiting_keep_no_server_from_being_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Server:
        def __init__(self, *_: object) -> None:
            self._has_ended = threading.Event()

        def start(self) -> str:
            return "http://a:1"

        def wait(self) -> None:
            self._has_ended.wait()

        def stop(self, seconds: float) -> None:
            self._has_ended.set()

    async def start_often() -> None:
        for _ in range(ray_servers.MAX_WAITS + 1):
            async with asyncio.timeout(60):
                assert await servers._start(actor) == "http://a:1"
            actor.wait.remote()

    monkeypatch.setattr(ray_servers, "RayServer", Server)
    # A cluster of its own, whose token is not the user's.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with ray_cluster("local"):
        [actor] = place_actors(1, [], {}, 0)
        servers = RayServers([actor])
        asyncio.run(start_often())
        servers.stop(0)


def test_a_server_that_finds_no_place_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_servers, "PLACING_SECONDS", 0)
    run([Actor([], []), Actor(["http://b:1"], [])], lambda replicas, _: len(replicas.all) == 1 and bool(caplog.text))
    assert "the cluster has no room for a server" in caplog.text


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://127.0.0.1:10001", "must be that of the cluster itself"),
        ("127.0.0.1:1", "cannot connect to 127.0.0.1:1: "),
        ("127.0.0.1:99999", "cannot connect to 127.0.0.1:99999: "),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^--ray-address: {message}"), ray_cluster(address):
        pass
