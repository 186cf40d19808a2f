"""A real server whose processes are killed: what clients see, and what is left behind."""

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import httpx2
import openai
import pytest

from keepsight.demo import checkpoint_path
from keepsight.observe.process_memory import with_descendants
from keepsight.program_identity import PACKAGE
from keepsight.silence import SILENT_SECONDS
from tests import real_server
from tests.drawn import Drawn, ask, by_url, draw
from tests.official_client import answer, complete, connect
from tests.real_server import COMMAND, END_SECONDS, START_SECONDS, end_without_a_trace, run_directory_of, serving
from tests.wait_until import wait_until

ENDLESS = {"max_tokens": None, "stream": True, "extra_body": {"ignore_eos": True}}


@dataclass
class Server:
    supervisor: subprocess.Popen[str]
    port: int
    log: Path

    def client(self, seconds: float = START_SECONDS) -> openai.OpenAI:
        return connect(self.port, timeout=seconds)

    def pid(self, kind: str) -> int:
        """Return the pid of the latest process of a kind."""
        return int(re.findall(rf"{kind}-\d+ \(pid (\d+)\) is ready", self.log.read_text())[-1])

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=START_SECONDS)

    def kill(self, kind: str) -> None:
        os.kill(self.pid(kind), signal.SIGKILL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with ExitStack() as running:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(real_server, "COMMAND", ["sh", "-c", 'ulimit -Sn 24; exec "$@"', "sh", *COMMAND])
            process, port = running.enter_context(serving(log))
        yield Server(process, port, log)


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(7)


def loaded_libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_each_of_its_processes_raises_its_open_file_limit_to_the_maximum(server: Server) -> None:
    for pid in with_descendants(server.supervisor.pid):
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard != 24


def test_only_the_engine_holds_torch_even_after_a_picture(server: Server, drawn: Drawn) -> None:
    with server.client() as client:
        assert answer(client, ask(by_url(drawn.picture), drawn.questions[0].text)) == drawn.description
    assert "libtorch" in loaded_libraries(server.pid("engine"))
    assert "libtorch" not in loaded_libraries(server.pid("frontend"))
    assert not re.search("libtorch|numpy", loaded_libraries(server.supervisor.pid))


def test_a_request_waiting_for_its_first_token_survives_a_killed_engine(server: Server, drawn: Drawn) -> None:
    with server.client() as client, ThreadPoolExecutor() as threads:
        os.kill(server.pid("engine"), signal.SIGSTOP)
        future = threads.submit(answer, client, ask(by_url(drawn.picture), drawn.questions[0].text))
        # The single-threaded frontend has read the request before it answers this.
        assert server.get("/ready").status_code == 200
        server.kill("engine")
        assert future.result(START_SECONDS) == drawn.description


def test_a_stream_that_has_begun_ends_with_an_error_and_the_next_request_is_answered(server: Server) -> None:
    with server.client() as client:
        stream = complete(client, ask("Hello"), **ENDLESS)
        next(iter(stream))
        server.kill("engine")
        with pytest.raises(openai.APIError) as lost:
            list(stream)
        assert lost.value.code == "engine_lost"
        assert complete(client, ask("Hello"), max_tokens=1).usage.completion_tokens == 1


def test_a_killed_frontend_loses_its_connections_and_frees_the_engine(server: Server, drawn: Drawn) -> None:
    killed = server.pid("frontend")
    with server.client() as client:
        streams = [complete(client, ask("Hello"), n=32, **ENDLESS) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        server.kill("frontend")
        for stream in streams:
            with pytest.raises((openai.APIError, httpx2.TransportError)):
                list(stream)
        assert answer(client, ask(by_url(drawn.picture), drawn.questions[0].text)) == drawn.description
    assert server.pid("frontend") != killed


def test_a_killed_supervisor_leaves_no_process_and_no_file(server: Server, drawn: Drawn, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, "--api-server-count", "2", "--mm-processor-cache-gb", "0.1") as (process, port):
        other = Server(process, port, log)
        with other.client() as client:
            assert answer(client, ask(by_url(drawn.picture), drawn.questions[0].text)) == drawn.description
        pids = {*with_descendants(process.pid)} - {process.pid}
        assert len(pids) >= 3
        end_without_a_trace(process.pid, pids)
    # Another server ran all the while and is unaffected.
    assert run_directory_of(server.supervisor.pid).exists()
    with server.client() as client:
        assert complete(client, ask("Hello"), max_tokens=1).usage.completion_tokens == 1


def test_a_server_does_not_restart_with_a_replaced_model(tmp_path: Path) -> None:
    model, log = shutil.copytree(checkpoint_path(), tmp_path / "model"), tmp_path / "log"
    with serving(log, str(model)) as (process, port):
        shutil.copyfile(model / "model.safetensors", model / "new")
        (model / "new").rename(model / "model.safetensors")
        Server(process, port, log).kill("engine")
        assert process.wait(END_SECONDS) == 1
    assert log.read_text().count("model.safetensors: was changed since the server started") == 3


def test_a_server_does_not_restart_with_another_version_of_the_program(tmp_path: Path) -> None:
    """As after an upgrade: a new process would not understand the others, or would compute something else."""
    package, log = shutil.copytree(PACKAGE, tmp_path / "src" / "keepsight"), tmp_path / "log"
    with serving(log, environment={"PYTHONPATH": str(package.parent)}) as (process, port):
        with (package / "requests.py").open("a") as file:
            file.write("# And a novelty.\n")
        server = Server(process, port, log)
        for media_worker in set(with_descendants(server.pid("frontend"))) - {server.pid("frontend")}:
            os.kill(media_worker, signal.SIGKILL)
        with server.client() as client, pytest.raises(openai.InternalServerError, match="restart the server"):
            complete(client, ask("What is it?", by_url(draw(1).picture)))
        server.kill("frontend")
        assert process.wait(END_SECONDS) == 1
    refusals = log.read_text().count("files were changed since the server started: restart the server")
    assert refusals == 3 + log.read_text().count("media workers cannot be started")


def test_a_server_whose_engine_stands_still_says_so_until_it_goes_on(server: Server) -> None:
    engine = server.pid("engine")
    with server.client() as client, ThreadPoolExecutor() as threads:
        os.kill(engine, signal.SIGSTOP)
        future = threads.submit(complete, client, ask("Hello"), max_tokens=1)
        wait_until(lambda: server.get("/ready").status_code == 503)
        assert server.get("/ready").json()["status"] == "the engine gives no sign of life"
        health = server.get("/health")
        assert (health.status_code, health.json()["silent_engines"]) == (200, 1)
        [silent] = re.findall(r"^keepsight_engine_silent_seconds (.+)$", server.get("/metrics").text, re.MULTILINE)
        assert float(silent) >= SILENT_SECONDS
        assert re.search(rf"\(pid {engine}\) has given no sign of life for .*, in state T ", server.log.read_text())
        os.kill(engine, signal.SIGCONT)
        assert future.result(START_SECONDS).usage.completion_tokens == 1
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert f"(pid {engine}) gives signs of life again" in server.log.read_text()
    assert server.pid("engine") == engine


def test_an_engine_that_stands_still_for_longer_than_the_watchdog_allows_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, "--watchdog-timeout", f"{SILENT_SECONDS:g}") as (process, port):
        server = Server(process, port, log)
        stopped = server.pid("engine")
        os.kill(stopped, signal.SIGSTOP)
        with server.client() as client:
            assert complete(client, ask("Hello"), max_tokens=1).usage.completion_tokens == 1
        assert server.pid("engine") != stopped
    assert re.search(rf"\(pid {stopped}\) was killed by SIGKILL \(for its silence\); another is", log.read_text())


def test_a_signal_to_all_processes_lets_a_running_answer_finish(server: Server) -> None:
    """As systemd ends a service. Must be the last test here: it ends the shared server."""
    options = {**ENDLESS, "max_tokens": 150}
    with server.client() as client:
        stream = iter(complete(client, ask("Hello"), **options))
        next(stream)
        for pid in reversed([*with_descendants(server.supervisor.pid)]):
            os.kill(pid, signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.supervisor.wait(END_SECONDS) == 0
    assert server.supervisor.stdout is not None
    assert server.supervisor.stdout.read() == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=END_SECONDS)
    end_of_log = server.log.read_text().partition("shutting down")[2]
    assert "ERROR" not in end_of_log
    assert "WARNING" not in end_of_log
    assert "Traceback" not in server.log.read_text()
