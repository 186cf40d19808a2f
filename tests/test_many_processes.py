"""Real servers with several frontends or several engines, some of which are killed."""

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import httpx
import openai
import pytest

from tests.cli.test_serve_recovers import ENDLESS, Server
from tests.drawn import ask, by_url, draw
from tests.official_client import answer, complete
from tests.place import on_cpu_alone
from tests.real_server import START_SECONDS, serving
from tests.wait_until import wait_until

SMALL = ("--mm-processor-cache-gb", "0.1")


class Servers(Server):
    def pid_of(self, name: str) -> int:
        return int(re.findall(rf"{name} \(pid (\d+)\) is ready", self.log.read_text())[0])

    def living_engines(self) -> list[int]:
        pids = map(int, re.findall(r"engine-\d+ \(pid (\d+)\) is ready", self.log.read_text()))
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def await_log(self, pattern: str) -> None:
        for _ in range(START_SECONDS * 10):
            if re.search(pattern, self.log.read_text()):
                return
            with pytest.raises(TimeoutExpired):
                self.supervisor.wait(0.1)
        raise AssertionError(self.log.read_text())


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, "--data-parallel-size", "2", *SMALL) as (process, port):
        # The frontend may still be connecting to the engine that was ready last.
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/health", timeout=START_SECONDS).json()["engines"] == 2)
        yield Servers(process, port, log)


def describe(server: Server, seed: int) -> bool:
    """Return whether the server describes a picture correctly, asked on a new connection."""
    drawn = draw(seed)
    with server.client() as client:
        return answer(client, ask(by_url(drawn.picture), drawn.questions[0].text)) == drawn.description


def test_four_frontends_answer_correctly_about_one_new_picture_and_many(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, "--api-server-count", "4", "--media-workers", "4", *SMALL) as (process, port):
        server = Servers(process, port, log)
        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(describe, [server] * 24, [1] * 12 + [2, 3, 4] * 4))
        os.kill(server.pid_of("frontend-1"), signal.SIGKILL)
        server.await_log(r"frontend-5 \(pid \d+\) is ready")
        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(describe, [server] * 8, [1] * 8))
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_SECONDS) == 0
    assert "Traceback" not in log.read_text()


@on_cpu_alone("each engine would need a GPU of its own")
def test_a_killed_engine_loses_only_its_own_streams(two_engines: Servers) -> None:
    with two_engines.client() as client, ThreadPoolExecutor() as threads:
        # The second goes to the less loaded engine.
        streams = [complete(client, ask("Hello"), **ENDLESS) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        os.kill(two_engines.living_engines()[0], signal.SIGKILL)
        ends = Counter(threads.map(end_of, streams))
        assert ends == {"engine_lost": 1, "length": 1}
        assert describe(two_engines, 7)
    two_engines.await_log(r"engine-3 \(pid \d+\) is ready")
    assert describe(two_engines, 7)


def end_of(stream: Any) -> str:
    try:
        return str([chunk.choices[0].finish_reason for chunk in stream if chunk.choices][-1])
    except openai.APIError as lost:
        return str(lost.code)


@on_cpu_alone("each engine would need a GPU of its own")
def test_requests_waiting_for_a_killed_engine_are_answered_by_the_other(two_engines: Servers) -> None:
    killed, other = two_engines.living_engines()
    for pid in (killed, other):
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as threads:
        futures = [threads.submit(describe, two_engines, seed) for seed in (1, 2, 3, 4)]
        # The single-threaded frontend has read some of the requests before it answers this.
        assert httpx.get(f"http://127.0.0.1:{two_engines.port}/ready", timeout=START_SECONDS).status_code == 200
        os.kill(killed, signal.SIGKILL)
        two_engines.await_log(rf"engine-\d \(pid {killed}\) was killed by SIGKILL .*; another is started")
        os.kill(other, signal.SIGCONT)
        assert [each.result(START_SECONDS) for each in futures] == [True] * 4
