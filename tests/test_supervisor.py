"""A real supervisor with fake child processes (`fake_process.py`)."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from keepsight.ipc.control import FAILED_AT_WORK
from keepsight.observe.catalogue import RESTARTED
from keepsight.observe.process_memory import children_of
from keepsight.observe.totals import Totals
from keepsight.supervisor import MAX_FAILED_STARTS, SILENT, url_of
from tests.wait_until import wait_until

FAKE = Path(__file__).parent / "fake_process.py"
PATIENCE = 60  # seconds; normally takes far less
SUPERVISE = """
import ctypes, json, socket, sys
from pathlib import Path
from keepsight import child_process, silence, supervisor
from keepsight.api_settings import ApiSettings
from keepsight.cli.main import main
from keepsight.errors import ServerStartError
from keepsight.ipc.server_log import begin_log
from keepsight.ipc.take_signals import take_signals
from keepsight.supervisor import ServerSettings, Supervisor

child_process.SETTLING_SECONDS = 60  # on a busy machine all that a test says comes late
PR_SET_CHILD_SUBREAPER = 36  # as the first process of a container is
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
begin_log()
path, silent_seconds, num_frontends, num_engines, shutdown_seconds, *command = sys.argv[1:]
silence.SILENT_SECONDS = float(silent_seconds)
silence.LOOK_SECONDS = supervisor.LOOK_SECONDS = min(silence.LOOK_SECONDS, silence.SILENT_SECONDS / 4)
settings = ServerSettings(
    options=json.loads((Path(path) / "options").read_text()), model_name="mine", files={}, program="",
    run_directory=Path(path), pixel_mode="shared", num_frontends=int(num_frontends), num_engines=int(num_engines),
    api=ApiSettings(), shutdown_seconds=float(shutdown_seconds), watchdog_seconds=12.5,
)
with socket.create_server(("127.0.0.1", 0)) as listener, take_signals() as signals:
    try:
        status = Supervisor(settings, listener, signals, command, command).run()
    except ServerStartError as error:
        status = str(error)
heavy = {"torch", "numpy", "starlette", "uvicorn", "zmq"} & set(sys.modules)
assert not heavy, heavy
sys.exit(status)
"""


class Actor:
    """The test's handle to a (fake) process of the server."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection, self._lines = connection, connection.makefile()
        self.pid, self.start = json.loads(self._lines.readline())
        self.kind = {"StartEngine": "engine", "StartFrontend": "frontend"}[self.start["type"]]

    def hear(self) -> Any:
        pid, message = json.loads(self._lines.readline())
        assert pid == self.pid
        return message

    def wait(self) -> None:
        """Wait until the process has ended."""
        with suppress(ConnectionResetError):
            for _ in self._lines:
                pass

    def do(self, order: object) -> None:
        self._connection.sendall(json.dumps(order).encode() + b"\n")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


def has_zombies(parent: int) -> bool:
    return any(
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z" for pid in children_of(parent)
    )


class Stage:
    def __init__(self, path: Path) -> None:
        # The run directory.
        self.path = path / "run"
        self.path.mkdir()
        self.log_path, self._address = path / "log", path / "stage"
        self.options: dict[str, object] = {"model": "some/model"}
        # When an engine that has given a sign of life counts as silent.
        self.silent_seconds = 1000.0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._address))
        self._socket.listen()
        self._socket.settimeout(PATIENCE)
        self._actors: list[Actor] = []
        self._supervisor: subprocess.Popen[bytes] | None = None

    def num_restarted(self, kind: str) -> float:
        """Return the number of restarts according to the metrics."""
        return Totals.of_server(self.path).numbers[RESTARTED[kind]]

    def start(self, num_frontends: int = 1, shutdown_seconds: float = 60, num_engines: int = 1) -> list[Actor]:
        """Start the server. Return engines, then frontends, each in order of rank."""
        self.supervise(num_frontends, num_engines, shutdown_seconds, sys.executable, FAKE, self._address)
        actors = (self.next() for _ in range(num_engines + num_frontends))
        return sorted(actors, key=lambda actor: (actor.kind, actor.start["rank"]))

    def supervise(self, *arguments: object) -> None:
        (self.path / "options").write_text(json.dumps(self.options))
        with self.log_path.open("w") as log:
            command = [sys.executable, "-c", SUPERVISE, *map(str, (self.path, self.silent_seconds, *arguments))]
            self._supervisor = subprocess.Popen(command, stderr=log)

    def start_serving(self, num_frontends: int = 1, shutdown_seconds: float = 60, num_engines: int = 1) -> list[Actor]:
        actors = self.start(num_frontends, shutdown_seconds, num_engines)
        for engine in actors[:num_engines]:
            engine.do("ready")
        for frontend in actors[num_engines:]:
            assert kinds([frontend.hear() for _ in range(num_engines)]) == ["EngineReady"] * num_engines
            frontend.do("ready")
        self.wait_for_log(r"mine is served on http://127\.0\.0\.1:\d+/v1 after")
        return actors

    def next(self) -> Actor:
        connection, _ = self._socket.accept()
        self._actors.append(Actor(connection))
        return self._actors[-1]

    def send_signal(self, number: signal.Signals) -> None:
        assert self._supervisor is not None
        self._supervisor.send_signal(number)

    def take_descriptors(self) -> None:
        """Lower the supervisor's limit of file descriptors, so that it can open no more."""
        assert self._supervisor is not None
        resource.prlimit(self._supervisor.pid, resource.RLIMIT_NOFILE, (3, 3))

    def has_zombies(self) -> bool:
        assert self._supervisor is not None
        return has_zombies(self._supervisor.pid)

    def wait(self) -> int:
        assert self._supervisor is not None
        return self._supervisor.wait(PATIENCE)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_for_log(self, pattern: str) -> "re.Match[str]":
        assert self._supervisor is not None
        for _ in range(PATIENCE * 50):
            if found := re.search(pattern, self.log):
                return found
            try:
                self._supervisor.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
            break
        raise AssertionError(self.log)

    def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.kill()
            self._supervisor.wait()
        for actor in self._actors:
            actor.wait()
        self._socket.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


@contextmanager
def inherited_by_children(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def kinds(messages: Sequence[Any]) -> list[str]:
    return [message["type"] for message in messages]


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (("127.0.0.1", 8000), "https://127.0.0.1:8000/v1"),
        (("::", 8000, 0, 0), "https://[::]:8000/v1"),
        (("fe80::1", 8000, 0, socket.if_nametoindex("lo")), "https://[fe80::1%lo]:8000/v1"),
    ],
)
def test_the_url_of_any_address_can_be_opened(address: tuple[Any, ...], url: str) -> None:
    """An address of one network is nothing without the interface."""
    assert url_of("https", *address) == url


def test_all_processes_start_at_once_and_get_their_start_parameters(stage: Stage) -> None:
    engine, *frontends = stage.start(num_frontends=2)
    assert engine.start["options"] == {"model": "some/model"}
    assert engine.start["endpoint"] == f"ipc://{stage.path}/engine-1"
    assert {frontend.start["frontend_id"] for frontend in frontends} == {"frontend-1", "frontend-2"}
    assert all(frontend.start["model_name"] == "mine" for frontend in frontends)


def test_options_longer_than_a_socket_holds_reach_all_processes(stage: Stage) -> None:
    # Twice: the second engine begins when the server runs.
    stage.options["allowed_media_domains"] = [f"images-{number:05}.example.org" for number in range(30_000)]
    engine, frontend = stage.start_serving()
    engine.kill()
    again = stage.next()
    again.do("ready")
    assert engine.start["options"] == frontend.start["options"] == again.start["options"] == stage.options
    assert engine.start["watchdog_seconds"] == again.start["watchdog_seconds"] == 12.5
    assert kinds([frontend.hear(), frontend.hear()]) == ["EngineLost", "EngineReady"]


def test_the_server_is_announced_when_engine_and_frontends_are_ready(stage: Stage) -> None:
    engine, first, second = stage.start(num_frontends=2)
    engine.do("ready")
    for frontend in (first, second):
        assert frontend.hear() == {"type": "EngineReady", "endpoint": engine.start["endpoint"], "rank": 0}
    first.do("ready")
    assert "is served" not in stage.log
    second.do("ready")
    stage.wait_for_log("mine is served on")


def test_a_lost_engine_is_replaced_and_frontends_are_notified(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    left = Path(engine.start["endpoint"].removeprefix("ipc://"))
    left.touch()
    engine.kill()
    assert frontend.hear() == {"type": "EngineLost", "rank": 0}
    successor = stage.next()
    assert successor.start["endpoint"] == f"ipc://{stage.path}/engine-2"
    assert not left.exists()
    successor.do("ready")
    assert frontend.hear() == {"type": "EngineReady", "endpoint": successor.start["endpoint"], "rank": 0}
    stage.wait_for_log(
        rf"engine-1 \(pid {engine.pid}\) was killed by SIGKILL \(as when memory .*\); another is started"
    )
    stage.wait_for_log(rf"engine-2 \(pid {successor.pid}\) is ready")
    assert [stage.num_restarted(kind) for kind in ("engine", "frontend")] == [1, 0]


def test_frontends_are_told_when_an_engine_falls_silent_and_when_it_is_heard_again(stage: Stage) -> None:
    stage.silent_seconds = 0.2
    _, engine, frontend = stage.start_serving(num_engines=2)
    engine.do(["live", 0])
    for _ in range(2):
        assert frontend.hear() == {"type": "EngineSilent", "rank": 1}
        engine.do(["live", 0])
        assert frontend.hear() == {"type": "EngineHeard", "rank": 1}
    stage.wait_for_log(rf"engine-2 \(pid {engine.pid}\) has given no sign of life for \d+ s, in state [A-Z] \(\w+\)")
    wait_until(lambda: Totals.of_server(stage.path).numbers[SILENT] >= 0.2)
    stage.wait_for_log(rf"engine-2 \(pid {engine.pid}\) gives signs of life again")
    assert "killed" not in stage.log


def test_an_engine_that_is_silent_for_too_long_is_replaced(stage: Stage) -> None:
    stage.silent_seconds = 0.2
    engine, frontend = stage.start_serving()
    engine.do(["live", 0.4])
    assert frontend.hear()["type"] == "EngineSilent"
    assert frontend.hear()["type"] == "EngineLost"
    stage.next()
    stage.wait_for_log(r"killed by SIGKILL \(for its silence\); another is started")
    assert stage.num_restarted("engine") == 1


def test_orphaned_children_of_a_lost_frontend_are_reaped(stage: Stage) -> None:
    _, frontend = stage.start_serving()
    frontend.do("fork")
    wait_until(lambda: has_zombies(frontend.pid))
    frontend.kill()
    stage.next()
    wait_until(lambda: not stage.has_zombies())


def test_a_lost_frontend_is_replaced_under_another_name_and_the_engine_is_notified(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    frontend.do(3)
    assert engine.hear() == {"type": "FrontendLost", "frontend_id": "frontend-1"}
    successor = stage.next()
    assert successor.start["frontend_id"] == "frontend-2"
    assert successor.hear() == {"type": "EngineReady", "endpoint": engine.start["endpoint"], "rank": 0}
    stage.wait_for_log(rf"frontend-1 \(pid {frontend.pid}\) ended with status 3; another is started")
    assert [stage.num_restarted(kind) for kind in ("engine", "frontend")] == [0, 1]


def test_the_working_directory_may_be_removed_after_the_start(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    release = stage.path / "release"
    release.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(release)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # relative entries would no longer resolve
        engine, _ = stage.start_serving()
    assert Path(f"/proc/{engine.pid}/cwd").readlink() == release
    release.rmdir()
    engine.kill()
    assert Path(f"/proc/{stage.next().pid}/cwd").readlink() == stage.path


@pytest.mark.parametrize("is_noticed_by_a_death", [True, False])
def test_a_server_without_its_run_directory_ends_after_its_answers(stage: Stage, is_noticed_by_a_death: bool) -> None:
    engine, frontend = stage.start_serving()
    shutil.rmtree(stage.path)
    if is_noticed_by_a_death:
        frontend.kill()
    else:
        stage.send_signal(signal.SIGCHLD)  # wakes it, as the next minute would
        assert frontend.hear()["type"] == "Drain"
        frontend.do(0)
    assert engine.hear()["type"] == "Drain"
    engine.do(0)
    assert stage.wait() == 1
    stage.wait_for_log(rf"{stage.path} was removed")
    assert "another is started" not in stage.log


def test_a_lost_engine_among_several_is_replaced_at_its_rank(stage: Stage) -> None:
    first, second, frontend = stage.start_serving(num_engines=2)
    assert [each.start["rank"] for each in (first, second)] == [0, 1]
    assert {each.start["num_engines"] for each in (first, second, frontend)} == {2}
    second.kill()
    lost = frontend.hear()
    assert (lost["type"], lost["rank"]) == ("EngineLost", 1)
    successor = stage.next()
    assert (successor.start["rank"], Path(successor.start["endpoint"]).name) == (1, "engine-3")
    successor.do("ready")
    ready = {"type": "EngineReady", "endpoint": successor.start["endpoint"], "rank": 1}
    assert frontend.hear() == ready
    frontend.kill()
    assert {each.hear()["type"] for each in (first, successor)} == {"FrontendLost"}
    new_frontend = stage.next()
    assert [new_frontend.hear()["rank"] for _ in range(2)] == [0, 1]


def test_other_engines_continue_if_one_cannot_be_restarted(stage: Stage) -> None:
    first, second, frontend = stage.start_serving(num_engines=2)
    first.kill()
    for _ in range(3):
        assert frontend.hear()["type"] == "EngineLost"
        stage.next().kill()
    assert frontend.hear()["type"] == "EngineLost"
    stage.wait_for_log(r"engine-5 .* its start failed 3 times: continuing with engine-2")
    second.kill()
    for _ in range(3):
        assert frontend.hear()["type"] == "EngineLost"
        stage.next().kill()
    assert kinds([frontend.hear() for _ in range(3)]) == ["EngineLost", "GiveUp", "Drain"]
    frontend.do(0)
    assert stage.wait() == 1


def test_a_frontend_started_without_an_engine_is_notified_when_one_is_ready(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    engine.kill()
    assert frontend.hear()["type"] == "EngineLost"
    new_engine = stage.next()
    frontend.kill()
    new_frontend = stage.next()
    new_engine.do("ready")
    assert new_frontend.hear() == {"type": "EngineReady", "endpoint": new_engine.start["endpoint"], "rank": 0}


def test_repeatedly_failing_starts_end_the_server(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    engine.kill()
    for message in ("out of memory", "out of memory", "out of memory"):
        assert frontend.hear()["type"] == "EngineLost"
        successor = stage.next()
        successor.do(["fail", message])
        successor.do(2)
    assert frontend.hear()["type"] == "EngineLost"
    assert frontend.hear() == {"type": "GiveUp", "reason": "the engine failed for good"}
    assert frontend.hear()["type"] == "Drain"
    frontend.do(0)
    assert stage.wait() == 1
    stage.wait_for_log(r"engine-4 \(pid \d+\) failed: out of memory")
    stage.wait_for_log(r"engine-4 \(pid \d+\) ended with status 2; its start failed 3 times: giving up")


def test_a_restart_refused_by_the_system_drains_and_ends_the_server(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    stage.take_descriptors()
    engine.kill()
    assert kinds([frontend.hear() for _ in range(3)]) == ["EngineLost", "GiveUp", "Drain"]
    frontend.do(0)
    assert stage.wait() == 1
    stage.wait_for_log(r"the engine cannot be started: .*Too many open files")


def test_a_first_start_refused_by_the_system_is_reported_in_one_line(stage: Stage) -> None:
    stage.supervise(1, 1, 60, "/no/such/program")
    assert stage.wait() == 1
    assert stage.log == "the engine cannot be started: [Errno 2] No such file or directory: '/no/such/program'\n"


def test_other_engines_continue_if_the_system_refuses_a_restart(stage: Stage) -> None:
    one, other, frontend = stage.start_serving(num_engines=2)
    stage.take_descriptors()
    one.kill()
    assert frontend.hear() == {"type": "EngineLost", "rank": 0}
    stage.wait_for_log(r"continuing with engine-2 \(pid \d+\)")
    stage.send_signal(signal.SIGTERM)
    assert frontend.hear()["type"] == "Drain"
    frontend.do(0)
    assert other.hear()["type"] == "Drain"
    other.do(0)
    assert stage.wait() == 0


@pytest.mark.parametrize("kind", ["engine", "frontend"])
def test_a_process_that_exits_right_after_ready_counts_as_a_failed_start(stage: Stage, kind: str) -> None:
    actors = dict(zip(("engine", "frontend"), stage.start_serving(), strict=True))
    actors[kind].do(1)
    for _ in range(2):
        actors[kind] = stage.next()
        actors[kind].do("ready")
        actors[kind].do(1)
    stage.wait_for_log(rf"{kind}-3 \(pid \d+\) ended with status 1; its start failed 3 times: giving up")
    actors[kind].wait()


def test_an_engine_that_fails_at_work_has_not_failed_to_start_however_soon(stage: Stage) -> None:
    """Otherwise a request that ends engines, and is asked again, would end the server."""
    engine, frontend = stage.start_serving()
    for _ in range(MAX_FAILED_STARTS + 1):
        engine.do(FAILED_AT_WORK)
        assert frontend.hear()["type"] == "EngineLost"
        engine = stage.next()
        engine.do("ready")
        assert frontend.hear()["type"] == "EngineReady"


def test_a_successful_start_resets_the_failure_count(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    engine.kill()
    for succeeds in (False, False, True, False, False, True):
        assert frontend.hear()["type"] == "EngineLost"
        successor = stage.next()
        if succeeds:
            successor.do("ready")
            assert frontend.hear()["type"] == "EngineReady"
        successor.kill()
    assert frontend.hear()["type"] == "EngineLost"


@pytest.mark.parametrize("index", [0, 1])
def test_a_failed_first_start_reports_the_process_s_error_and_is_not_retried(stage: Stage, index: int) -> None:
    actors = stage.start()
    actors[index].do(["fail", "no/such/model: no such folder"])
    assert stage.wait() == 1  # sys.exit with a text; the command itself exits with 2
    assert stage.log == "no/such/model: no such folder\n"
    for actor in actors:
        actor.wait()


def test_a_crashed_first_start_is_not_retried(stage: Stage) -> None:
    engine, frontend = stage.start()
    engine.kill(signal.SIGSEGV)
    assert stage.wait() == 1
    frontend.wait()
    assert f"engine-1 (pid {engine.pid}) was killed by SIGSEGV before it was ready" in stage.log


def test_two_processes_dying_at_once_during_the_first_start_end_it(stage: Stage) -> None:
    actors = stage.start()
    stage.send_signal(signal.SIGSTOP)
    for actor in actors:
        actor.kill()
        actor.wait()
    stage.send_signal(signal.SIGCONT)
    assert stage.wait() == 1
    assert "Traceback" not in stage.log


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 0)])
def test_a_signal_lets_frontends_finish_and_then_the_engine(stage: Stage, number: signal.Signals, status: int) -> None:
    with inherited_by_children(signal.SIGHUP, signal.SIG_DFL):  # the tests themselves may run under nohup
        engine, frontend = stage.start_serving()
    stage.send_signal(number)
    assert frontend.hear()["type"] == "Drain"
    with pytest.raises(ConnectionRefusedError):  # the supervisor has closed the port, as the frontend has
        socket.create_connection(("127.0.0.1", int(stage.wait_for_log(r":(\d+)/v1")[1])), timeout=PATIENCE)
    frontend.do(0)
    assert engine.hear()["type"] == "Drain"
    engine.do(0)
    assert stage.wait() == status
    assert "ERROR" not in stage.log


def test_a_server_started_by_nohup_outlives_its_terminal(stage: Stage) -> None:
    with inherited_by_children(signal.SIGHUP, signal.SIG_IGN):  # as nohup does
        _, frontend = stage.start_serving()
    stage.send_signal(signal.SIGHUP)
    frontend.kill()
    assert stage.next().start["frontend_id"] == "frontend-2"


def test_a_second_signal_aborts_running_answers_and_a_third_kills(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    stage.send_signal(signal.SIGTERM)
    assert frontend.hear()["type"] == "Drain"
    stage.send_signal(signal.SIGTERM)
    assert frontend.hear() == {"type": "GiveUp", "reason": "the server is shutting down"}
    assert frontend.hear()["type"] == "Drain"
    stage.send_signal(signal.SIGTERM)
    frontend.wait()
    engine.wait()
    assert stage.wait() == 0


def test_the_shutdown_timeout_may_be_a_year(stage: Stage) -> None:
    engine, frontend = stage.start_serving(shutdown_seconds=365 * 86400)
    stage.send_signal(signal.SIGTERM)
    assert frontend.hear()["type"] == "Drain"
    frontend.do(0)
    assert engine.hear()["type"] == "Drain"
    engine.do(0)
    assert stage.wait() == 0


def test_answers_that_outlast_the_shutdown_timeout_are_aborted(stage: Stage) -> None:
    engine, frontend = stage.start_serving(shutdown_seconds=0)
    stage.send_signal(signal.SIGTERM)
    assert kinds([frontend.hear() for _ in range(3)]) == ["Drain", "GiveUp", "Drain"]
    frontend.do(0)
    assert engine.hear()["type"] == "Drain"
    engine.do(0)
    assert stage.wait() == 0


def test_an_engine_that_dies_while_answers_finish_is_not_replaced(stage: Stage) -> None:
    engine, frontend = stage.start_serving()
    stage.send_signal(signal.SIGTERM)
    assert frontend.hear()["type"] == "Drain"
    engine.kill()
    assert frontend.hear()["type"] == "GiveUp"
    frontend.do(0)
    assert stage.wait() == 0


def test_a_signal_during_the_start_ends_it(stage: Stage) -> None:
    actors = stage.start()
    stage.send_signal(signal.SIGTERM)
    assert stage.wait() == 0
    for actor in actors:
        actor.wait()


def test_no_process_outlives_a_killed_supervisor(stage: Stage) -> None:
    actors = stage.start_serving(num_frontends=2)
    stage.send_signal(signal.SIGKILL)
    for actor in actors:
        actor.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_sent_to_every_process_means_only_the_supervisor(stage: Stage, number: signal.Signals) -> None:
    """As service managers send SIGTERM, and terminals the others."""
    with inherited_by_children(signal.SIGHUP, signal.SIG_DFL):
        engine, frontend = stage.start_serving()
    for actor in (engine, frontend):
        actor.kill(number)
    stage.send_signal(number)
    assert frontend.hear()["type"] == "Drain"
    frontend.do(0)
    assert engine.hear()["type"] == "Drain"
    engine.do(0)
    assert stage.wait() == (130 if number == signal.SIGINT else 0)
    assert "ERROR" not in stage.log


def test_processes_have_sessions_without_a_terminal(stage: Stage) -> None:
    actors = stage.start_serving()
    assert {os.getsid(actor.pid) for actor in actors} == {actor.pid for actor in actors}
