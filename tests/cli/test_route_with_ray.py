"""`keepsight route --ray` with a real cluster of one node, and the official client."""

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from keepsight.cli.main import main
from keepsight.observe.process_memory import with_descendants
from tests.cli.test_serve_metrics import read_counter
from tests.drawn import ask, by_url, draw
from tests.official_client import answer, connect
from tests.place import FLAGS
from tests.real_server import END_SECONDS, routing
from tests.wait_until import wait_until

pytest.importorskip("ray", reason="the extra 'ray' is not installed")


@dataclass(frozen=True)
class Cluster:
    """A router and two servers that it had Ray start."""

    port: int
    pid: int

    def find_servers(self) -> dict[str, int]:
        """Return the servers' processes by their addresses."""
        found = {}
        for pid in with_descendants(self.pid):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if words[3:5] == ["keepsight", "serve"]:
                    host, port = words[words.index("--host") + 1], words[words.index("--port") + 1]
                    found[f"http://{host}:{port}"] = pid
        return found

    def wait_until_ready(self) -> None:
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{self.port}/health").json()["ready"] == 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    # A cluster of its own, whose token is not the user's.
    environment = {"RAY_ADDRESS": "local", "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    flags = ["--ray", "2", "--", *FLAGS, "--max-num-seqs", "8"]
    with routing(folder / "router", flags=flags, environment=environment) as (process, port):
        cluster = Cluster(port, process.pid)
        cluster.wait_until_ready()
        yield cluster
        everything = list(with_descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * END_SECONDS) == 0
        wait_until(lambda: not [pid for pid in everything if Path(f"/proc/{pid}/exe").exists()])


def test_a_picture_is_encoded_by_one_of_the_servers_that_ray_started(cluster: Cluster) -> None:
    drawn, servers = draw(7), cluster.find_servers()
    assert len(servers) == 2
    with connect(cluster.port) as client:
        for question in drawn.questions[:4]:
            assert answer(client, ask(by_url(drawn.picture), question.text)) == question.answer
    assert sum(read_counter(url, "media_encoded_total", modality="image") for url in servers) == 1


def test_a_server_that_is_killed_is_started_again_and_the_flags_are_its_own(cluster: Cluster) -> None:
    before = cluster.find_servers()
    killed, other = before
    os.kill(before[killed], signal.SIGKILL)
    wait_until(lambda: cluster.find_servers().keys() - before.keys())
    # Not of the first that is seen: if its port is taken meanwhile, another is started.
    cluster.wait_until_ready()
    after = cluster.find_servers()
    [new] = after.keys() - before.keys()
    assert after[other] == before[other]
    drawings = map(draw, itertools.count(20))
    with connect(cluster.port) as client:

        def encodes() -> bool:
            drawn = next(drawings)
            assert answer(client, ask(by_url(drawn.picture), drawn.questions[0].text)) == drawn.questions[0].answer
            return read_counter(new, "media_encoded_total", modality="image") > 0

        wait_until(encodes)
    for pid in after.values():
        assert b"--max-num-seqs\x008\x00" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ray", "0"], "--ray: must be at least 1, not 0"),
        (["--ray", "1", "--replica", "http://a"], "--replica: cannot be given with --ray"),
        (["--ray", "1", "--", "--port", "1"], "--port: is the router's"),
        (["--ray", "1", "--ray-address", "127.0.0.1:1"], "--ray-address: cannot connect to 127.0.0.1:1"),
        (["--replica", "http://a", "stray"], "--ray: is needed if servers are to be started (stray)"),
        (["--replica", "http://a", "--ray-address", "auto"], "--ray: is needed if servers are to be started (auto)"),
    ],
)
def test_flags_without_sense_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["route", "--port", "0", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"keepsight route: {message}")


def test_a_flag_that_servers_lack_is_refused_before_any_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["route", "--port", "0", "--ray", "1", "--", "--nonsense"])
    [line] = capsys.readouterr().err.splitlines()
    assert "unrecognized arguments: --nonsense" in line
