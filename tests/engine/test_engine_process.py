"""An engine's process, run without a process: a real socket and a real loop over the fake runner."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from time import sleep
from types import SimpleNamespace
from typing import cast

import pytest

from keepsight.config import Config
from keepsight.engine import engine_process
from keepsight.engine.engine_process import HAND_OVER_SECONDS, EngineProcess
from keepsight.engine.inbox import Inbox
from keepsight.errors import ServerStartError
from keepsight.ipc.channel import FrontendChannel
from keepsight.ipc.codec import encode_to_engine
from keepsight.ipc.control import FAILED_AT_WORK, Drain, FrontendLost, ProcessEnd, StartEngine
from keepsight.program_identity import identify_program
from keepsight.requests import (
    AbortRequest,
    EngineRequest,
    FromEngine,
    MediaArrived,
    MediaHeld,
    MediaNeeded,
    RequestBegun,
    RequestFailed,
    TokenOutput,
)
from keepsight.scheduling.step_plan import StepPlan, StepResult
from keepsight.testing import FakeRunner, expected_answer, pixels_like
from tests.engine.made_up_engine import make_engine
from tests.scheduling.drive import END_IDS, make_config, make_request

SOON = 20  # seconds, for operations that take milliseconds
SECONDS_OF_A_STEP = 0.0005


class Runner(FakeRunner):
    """Fails or hangs when told to, and sleeps in each step so that readers of its tokens keep up."""

    is_broken = False
    may_return: threading.Event | None = None

    def run(self, plan: StepPlan) -> StepResult:
        if self.is_broken:
            raise RuntimeError("out of memory")
        if self.may_return is not None:
            self.may_return.wait()
        sleep(SECONDS_OF_A_STEP)
        return super().run(plan)


class Engine:
    def __init__(self, path: Path, *, computes_on_cores: bool = False, watchdog_seconds: float = 0) -> None:
        self.config = make_config(num_blocks=5000)
        self.runner = Runner(self.config.kv_cache.num_blocks, self.config.kv_cache.block_size)
        self.endpoint = f"ipc://{path}/engine-1"
        start = StartEngine({}, str(path), "none", self.endpoint, {}, watchdog_seconds, program="this")
        loaded = make_engine(self.config, self.runner, Inbox(), computes_on_cores=computes_on_cores)
        self.process = EngineProcess(start, Config(), loaded)
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.status = self.process.run()

    def join(self) -> int | None:
        self._thread.join(SOON)
        return self.status


class Frontend:
    def __init__(self, engine: Engine, name: str) -> None:
        self.engine, self.outputs, self.ends = engine, SimpleQueue[FromEngine](), SimpleQueue[str]()
        self.channel = FrontendChannel(engine.endpoint, name, self._take, self.ends.put)
        self.welcome = self.channel.connect(SOON)

    def _take(self, outputs: Sequence[FromEngine]) -> None:
        for output in outputs:
            if not isinstance(output, RequestBegun):
                self.outputs.put(output)

    def ask(self, request: EngineRequest) -> list[int]:
        assert self.channel.send(request)
        tokens = []
        while True:
            output = self.outputs.get(timeout=SOON)
            assert isinstance(output, TokenOutput)
            assert output.request_id == request.request_id
            tokens.append(output.token_id)
            if output.finish_reason is not None:
                return tokens

    def expected(self, request: EngineRequest) -> list[int]:
        return expected_answer(request, 0, END_IDS, self.engine.config.scheduler.max_model_len)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.process.act_on(Drain())
    engine.join()


@pytest.fixture
def frontends(engine: Engine) -> Iterator[list[Frontend]]:
    frontends = [Frontend(engine, name) for name in ("one", "two")]
    yield frontends
    for frontend in frontends:
        frontend.channel.close()


def endless(request_id: str) -> EngineRequest:
    return make_request(request_id, 3, max_tokens=19_000, ignore_eos=True)


def test_a_frontend_receives_the_engine_s_properties(frontends: list[Frontend]) -> None:
    welcome = frontends[0].welcome
    assert (welcome.max_model_len, welcome.accepts_unrequested_pixels) == (20_000, True)


def test_each_frontend_gets_the_tokens_that_it_asked_for(frontends: list[Frontend]) -> None:
    for number, frontend in enumerate(frontends):
        request = make_request(f"{number}-0", 3 + number, max_tokens=9)
        assert frontend.ask(request) == frontend.expected(request)


def test_a_late_frontend_learns_what_is_held(engine: Engine, frontends: list[Frontend]) -> None:
    one, two = frontends
    assert one.channel.send(make_request("a", 2, "cat", 3, max_tokens=1))
    assert one.outputs.get(timeout=SOON) == MediaNeeded("a", ("cat",))
    assert one.channel.send(MediaArrived("cat", pixels_like("cat")))
    assert two.outputs.get(timeout=SOON) == MediaHeld(("cat",))
    late = Frontend(engine, "late")
    try:
        assert late.outputs.get(timeout=SOON) == MediaHeld(("cat",))
    finally:
        late.channel.close()


def test_pixels_that_cannot_be_read_fail_their_request_instead_of_being_waited_for(frontends: list[Frontend]) -> None:
    one, _ = frontends
    assert one.channel.send(make_request("a", 2, "cat", 3))
    assert one.outputs.get(timeout=SOON) == MediaNeeded("a", ("cat",))
    kind, body, _ = encode_to_engine(MediaArrived("cat", pixels_like("cat")))
    assert one.channel._io.outbox.try_put([kind, body, b"too few"], 0)
    failed = one.outputs.get(timeout=SOON)
    assert isinstance(failed, RequestFailed)
    assert failed.message.startswith("the engine could not read the pixels of cat: 7 bytes of pixels of the shape")


@pytest.mark.parametrize("computes_on_cores", [False, True])
def test_an_engine_that_computes_on_all_cores_lets_first_tokens_pass_and_no_others(
    computes_on_cores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(engine_process, "sleep", pauses.append)
    engine = Engine(tmp_path, computes_on_cores=computes_on_cores)
    frontend = Frontend(engine, "one")
    for number in range(3):
        frontend.ask(make_request(f"{number}-0", 3 + number, max_tokens=9))
    frontend.channel.close()
    engine.process.act_on(Drain())
    engine.join()
    assert pauses == [HAND_OVER_SECONDS] * (3 if computes_on_cores else 0)


def test_a_request_with_an_id_in_use_is_refused(frontends: list[Frontend]) -> None:
    one, two = frontends
    assert one.channel.send(endless("same"))
    one.outputs.get(timeout=SOON)
    assert two.channel.send(make_request("same", 1))
    assert two.outputs.get(timeout=SOON) == RequestFailed("same", "request 'same' exists already")


@pytest.mark.parametrize("is_reported", [True, False])
def test_requests_of_a_lost_frontend_are_aborted(engine: Engine, frontends: list[Frontend], is_reported: bool) -> None:
    one, two = frontends
    assert one.channel.send(endless("a"))
    one.outputs.get(timeout=SOON)
    if is_reported:
        engine.process.act_on(FrontendLost("one"))
    one.channel.close()
    # The name is free as soon as the request is forgotten.
    while isinstance(again := ask_one(two, "a"), RequestFailed):
        assert "already" in again.message
    assert isinstance(again, TokenOutput)


def ask_one(frontend: Frontend, request_id: str) -> FromEngine:
    assert frontend.channel.send(make_request(request_id, 4, max_tokens=1))
    return frontend.outputs.get(timeout=SOON)


def test_an_engine_that_breaks_exits_as_failed_and_its_frontends_learn_it_by_their_connections(
    engine: Engine, frontends: list[Frontend]
) -> None:
    assert frontends[0].channel.send(endless("a"))
    frontends[0].outputs.get(timeout=SOON)
    engine.runner.is_broken = True
    assert engine.join() == FAILED_AT_WORK
    for frontend in frontends:
        assert "ended" in frontend.ends.get(timeout=SOON)
        while not frontend.outputs.empty():
            assert isinstance(frontend.outputs.get(), TokenOutput)


def test_an_engine_that_breaks_while_it_owes_no_answer_is_itself_the_cause(
    engine: Engine, frontends: list[Frontend]
) -> None:
    ask_one(frontends[0], "a")
    engine.runner.is_broken = True
    frontends.append(Frontend(engine, "late"))  # is told what is held, in a step of its own
    assert engine.join() == 1


def test_an_engine_that_is_asked_to_end_has_not_failed(engine: Engine, frontends: list[Frontend]) -> None:
    assert frontends[0].channel.send(AbortRequest("unknown"))
    engine.process.act_on(Drain())
    assert engine.join() == 0


def test_a_request_to_a_failed_engine_that_is_still_closing_gets_no_answer_but_its_end(
    engine: Engine, frontends: list[Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the request goes to the next engine."""
    is_closing, may_close = threading.Event(), threading.Event()
    close = engine.runner.close

    def close_slowly() -> None:
        is_closing.set()
        assert may_close.wait(SOON)
        close()

    monkeypatch.setattr(engine.runner, "close", close_slowly)
    one, two = frontends
    assert one.channel.send(endless("a"))
    one.outputs.get(timeout=SOON)
    engine.runner.is_broken = True
    assert is_closing.wait(SOON)
    assert two.channel.send(make_request("b", 4, max_tokens=1))
    assert two.channel.send(AbortRequest("b"))
    may_close.set()
    assert engine.join() == FAILED_AT_WORK
    assert "ended" in two.ends.get(timeout=SOON)
    assert two.outputs.empty()


def test_an_engine_whose_step_never_ends_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, may_return = SimpleQueue[None](), threading.Event()
    monkeypatch.setattr(engine_process, "end_process", lambda: ends.put(None))
    engine = Engine(tmp_path, watchdog_seconds=0.2)
    frontend = Frontend(engine, "one")
    try:
        engine.runner.may_return = may_return
        assert frontend.channel.send(make_request("a", 4, max_tokens=1))
        ends.get(timeout=SOON)
    finally:
        may_return.set()
        frontend.channel.close()
        engine.process.act_on(Drain())
        engine.join()


def test_an_engine_of_another_version_of_the_program_than_the_server_s_does_not_start() -> None:
    contents, _, place = identify_program().partition(" ")
    start = StartEngine({}, "", "none", "", {}, 0, program=f"{contents[::-1]} {place}")
    control = cast(ProcessEnd, SimpleNamespace(receive=lambda: start))
    with pytest.raises(ServerStartError, match="files were changed since the server started"):
        engine_process.main(control)
