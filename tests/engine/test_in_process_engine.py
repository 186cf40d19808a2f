"""One request at a time, whoever asks and whoever leaves.  No model: a runner that waits when it is told to."""

import asyncio
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from keepsight.engine.in_process_engine import InProcessEngine
from keepsight.requests import EngineRequest, TokenOutput
from keepsight.runner.model_runner import ModelRunner
from keepsight.sampling_params import SamplingParams

WAIT_SECONDS = 10


def request(name: str, num_tokens: int = 3) -> EngineRequest:
    return EngineRequest(name, (1,), (), (), SamplingParams(max_tokens=num_tokens))


@dataclass
class FakeRunner:
    """Its tokens count up; `blocks` makes every step wait until `step` is set."""

    story: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    may_step: threading.Event = field(default_factory=threading.Event)
    in_step: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def __post_init__(self) -> None:
        self.may_step.set()

    def generate(self, request: EngineRequest) -> Generator[TokenOutput, None, None]:
        self._note(f"{request.request_id} starts")
        try:
            for number in range(request.sampling_params.max_tokens or 0):
                self.in_step.set()
                assert self.may_step.wait(WAIT_SECONDS)
                if self.fails:
                    raise RuntimeError("out of memory")
                yield TokenOutput(0, number)
        finally:
            self._note(f"{request.request_id} ends")

    def _note(self, line: str) -> None:
        self.story.append(line)
        self.threads.add(threading.get_ident())


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


def make_engine(runner: FakeRunner) -> InProcessEngine:
    return InProcessEngine(cast(ModelRunner, runner))


async def token_ids(engine: InProcessEngine, asked: EngineRequest) -> list[int]:
    return [token.token_id async for token in engine.generate(asked)]


def run(story: Any) -> None:
    asyncio.run(asyncio.wait_for(story, WAIT_SECONDS))


def test_requests_at_once_are_all_answered_one_after_the_other(runner: FakeRunner) -> None:
    async def story() -> None:
        engine = make_engine(runner)
        answers = await asyncio.gather(*(token_ids(engine, request(name, 4)) for name in "abc"))
        assert answers == [[0, 1, 2, 3]] * 3

    run(story())
    assert runner.story == ["a starts", "a ends", "b starts", "b ends", "c starts", "c ends"]
    assert len(runner.threads) == 1
    assert threading.get_ident() not in runner.threads


def test_the_event_loop_turns_while_a_step_is_computed(runner: FakeRunner) -> None:
    async def story() -> None:
        runner.may_step.clear()
        running = asyncio.ensure_future(token_ids(make_engine(runner), request("a")))
        while not runner.in_step.is_set():
            await asyncio.sleep(0)
        runner.may_step.set()  # nobody could, were the loop waiting for the step
        assert await running == [0, 1, 2]

    run(story())


def test_a_client_that_leaves_between_two_tokens_frees_the_engine(runner: FakeRunner) -> None:
    async def story() -> None:
        engine = make_engine(runner)
        tokens = engine.generate(request("a", 1000))
        assert (await anext(tokens)).token_id == 0
        await tokens.aclose()
        assert await token_ids(engine, request("b")) == [0, 1, 2]

    run(story())
    assert runner.story == ["a starts", "a ends", "b starts", "b ends"]
    assert len(runner.threads) == 1


def test_a_client_that_leaves_in_the_middle_of_a_step_frees_the_engine_after_it(runner: FakeRunner) -> None:
    async def story() -> None:
        engine = make_engine(runner)
        runner.may_step.clear()
        leaving = asyncio.ensure_future(token_ids(engine, request("a", 1000)))
        while not runner.in_step.is_set():
            await asyncio.sleep(0.001)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        staying = asyncio.ensure_future(token_ids(engine, request("b")))
        await asyncio.sleep(0.01)
        assert runner.story == ["a starts"]
        runner.may_step.set()
        assert await staying == [0, 1, 2]

    run(story())
    assert runner.story == ["a starts", "a ends", "b starts", "b ends"]


def test_a_client_that_leaves_while_it_waits_for_its_turn_is_forgotten(runner: FakeRunner) -> None:
    async def story() -> None:
        engine = make_engine(runner)
        runner.may_step.clear()
        first, leaving, last = (asyncio.ensure_future(token_ids(engine, request(name))) for name in "abc")
        await asyncio.sleep(0.01)
        leaving.cancel()
        runner.may_step.set()
        assert (await first, await last) == ([0, 1, 2], [0, 1, 2])

    run(story())
    assert runner.story == ["a starts", "a ends", "c starts", "c ends"]


def test_a_step_that_fails_is_its_own_request_s_failure(runner: FakeRunner) -> None:
    async def story() -> None:
        engine = make_engine(runner)
        runner.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            await token_ids(engine, request("a"))
        runner.fails = False
        assert await token_ids(engine, request("b")) == [0, 1, 2]

    run(story())
