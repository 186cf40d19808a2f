"""A real server's processes are killed at random under load: every caller gets one right answer, nothing is left over.

The same requests run three times: undisturbed, while processes are killed (even ones still starting), and undisturbed
again, after which memory is compared. `long_chaos` runs longer.
"""

import asyncio
import os
import re
import signal
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import httpx2
import openai

from tests.drawn import ask, by_url, draw, list_question
from tests.real_server import START_SECONDS, end_without_a_trace, proportional_bytes, run_directory_of, serving

# An environment variable that all descendants of a server inherit, even when reparented.
MARK = "KEEPSIGHT_TEST_MARK"
PROGRAMS = {"engine_process": "engine", "frontend_process": "frontend", "media_worker": "media worker"}
VICTIMS = {"engine": 2, "frontend": 2, "template": 1, "media worker": 3}
NUM_PICTURES = 24
PATIENCE = 120  # seconds for an answer on a busy machine


# Questions and answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    messages: list[dict[str, Any]]
    is_streamed: bool
    options: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    text: str
    finish_reason: str
    num_tokens: int


def write_questions(num_questions: int, rng: Random) -> list[Question]:
    """Return questions, half of them about one or two pictures; some pictures are far more popular than others."""
    drawings = [draw(seed) for seed in range(NUM_PICTURES)]
    popularity = [1 / (1 + index) for index in range(NUM_PICTURES)]
    questions = []
    for number in range(num_questions):
        chosen = rng.choices(drawings, popularity, k=rng.choice([0, 0, 1, 2]))
        options: dict[str, Any] = {}
        match chosen:
            case []:
                text, options = f"Hello {number % 50}", {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
            case [drawn]:
                text = rng.choice(drawn.questions).text
            case _:
                text = list_question(chosen).text
        messages = ask(*(by_url(drawn.picture) for drawn in chosen), text)
        questions.append(Question(messages, rng.random() < 0.5, options))
    return questions


class Callers:
    """Clients that retry when the server says so or the connection breaks, even during a stream."""

    def __init__(self, port: int, concurrency: int) -> None:
        url = f"http://127.0.0.1:{port}/v1"
        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE)
        self._seats = asyncio.Semaphore(concurrency)
        # Retries, counted by type of error.
        self.retried = Counter[str]()
        self.num_answers = 0

    async def ask_all(self, questions: Sequence[Question]) -> list[Answer]:
        return await asyncio.gather(*(self._ask(question) for question in questions))

    async def _ask(self, question: Question) -> Answer:
        async with self._seats:
            while True:
                try:
                    answer = await self._try_ask(question)
                except (openai.APIError, httpx2.TransportError) as error:
                    if not may_retry(error):
                        raise
                    self.retried[type(error).__name__] += 1
                    await asyncio.sleep(0.2)
                else:
                    self.num_answers += 1
                    return answer

    async def _try_ask(self, question: Question) -> Answer:
        create: Any = self._client.chat.completions.create
        options = {"model": "keepsight-demo", "messages": question.messages, "temperature": 0, **question.options}
        if not question.is_streamed:
            whole = await create(**options)
            return Answer(
                whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.completion_tokens
            )
        stream = await create(stream=True, stream_options={"include_usage": True}, **options)
        return join([chunk async for chunk in stream])


def join(chunks: Sequence[Any]) -> Answer:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    [finish_reason] = [choice.finish_reason for choice in choices if choice.finish_reason is not None]
    [usage] = [chunk.usage for chunk in chunks if chunk.usage is not None]
    return Answer("".join(choice.delta.content or "" for choice in choices), finish_reason, usage.completion_tokens)


def may_retry(error: Exception) -> bool:
    match error:
        case openai.APITimeoutError() | httpx2.TimeoutException():
            return False
        case openai.APIConnectionError() | httpx2.TransportError():
            return True
        case openai.APIError():
            return error.code in ("engine_lost", "media_workers_lost", "no_replica")
    return False


# The server ---------------------------------------------------------------------------------------------------


@dataclass
class Process:
    pid: int
    kind: str
    parent: int


@dataclass
class Server:
    supervisor: int
    port: int
    log: Path
    mark: str

    def processes(self) -> list[Process]:
        """Return all live processes of the server, whatever their parents."""
        found: list[Process] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(read_process(folder))
        kinds = {process.pid: process.kind for process in found}
        for process in found:
            if process.kind == "media worker" and kinds.get(process.parent) == "frontend":
                process.kind = "template"
        return found

    def ready_pids(self) -> set[int]:
        return {int(pid) for pid in re.findall(r"\(pid (\d+)\) is ready", self.log.read_text())}

    def all_are_ready(self) -> bool:
        serving = [process.pid for process in self.processes() if process.parent == self.supervisor]
        return len(serving) > 1 and self.ready_pids().issuperset(serving)

    def held_bytes(self) -> int:
        """Return the memory of these processes alone, without file pages, which other processes may share."""
        return sum(proportional_bytes(process.pid, "Pss_Anon") for process in self.processes()) + sum(
            file.stat().st_blocks * 512 for file in run_directory_of(self.supervisor).rglob("*")
        )

    def end_without_a_trace(self) -> None:
        end_without_a_trace(self.supervisor, [process.pid for process in self.processes()])
        assert all(process.kind == "ended" for process in self.processes())


def read_process(folder: Path) -> Process:
    program = (folder / "cmdline").read_bytes()
    kind = next((kind for name, kind in PROGRAMS.items() if f".{name}\0".encode() in program), "other")
    # These follow the process name, which may contain any character.
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return Process(int(folder.name), "ended" if state == "Z" else kind, int(parent))


@contextmanager
def marked_server(log: Path, *options: str) -> Iterator[Server]:
    mark = uuid.uuid4().hex
    with patch.dict(os.environ, {MARK: mark}), serving(log, *options) as (process, port):
        yield Server(process.pid, port, log, mark)


# The killer ---------------------------------------------------------------------------------------------------


@dataclass
class Killer:
    """Kills a process every so many answers, and often another soon after, possibly one that is still starting.

    But never two starting processes of the same kind in a row: a third failed start would end the server.
    """

    server: Server
    callers: Callers
    rng: Random
    answers_per_kill: int
    killed: Counter[str] = field(default_factory=Counter)
    _was_young: dict[str, bool] = field(default_factory=dict)
    _old_workers: set[int] = field(default_factory=set)

    async def kill_until_cancelled(self) -> None:
        while True:
            num_answers = self.callers.num_answers + self.rng.randint(1, 2 * self.answers_per_kill)
            while self.callers.num_answers < num_answers:
                await asyncio.sleep(self.rng.uniform(0, 0.1))
            self.kill_one()
            while self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.uniform(0, 3))
                self.kill_one()

    def kill_one(self) -> None:
        processes = self.server.processes()
        workers = [each for each in processes if each.kind == "media worker"]
        # A template process is known to be ready once it has forked workers.
        ready = self.server.ready_pids() | self._old_workers | {worker.parent for worker in workers}
        self._old_workers = {worker.pid for worker in workers}
        victims = [each for each in processes if each.kind in VICTIMS and self._may_kill(each, ready)]
        if victims:
            kinds = sorted({process.kind for process in victims})
            kind = self.rng.choices(kinds, [VICTIMS[each] for each in kinds])[0]
            self._kill(self.rng.choice([process for process in victims if process.kind == kind]), ready)

    def _may_kill(self, process: Process, ready: set[int]) -> bool:
        # A picture whose worker dies twice is considered faulty.
        may_be_young = process.kind != "media worker" and not self._was_young.get(process.kind, False)
        return may_be_young or process.pid in ready

    def _kill(self, victim: Process, ready: set[int]) -> None:
        is_young = victim.pid not in ready
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
            self._was_young[victim.kind] = is_young
            self.killed[f"young {victim.kind}" if is_young else victim.kind] += 1


@dataclass
class Outcome:
    killed: Counter[str]
    retried: Counter[str]
    bytes_before: int
    bytes_after: int


async def run_while_killing(
    server: Server, questions: Sequence[Question], rng: Random, concurrency: int, answers_per_kill: int
) -> Outcome:
    callers = Callers(server.port, concurrency)
    killer = Killer(server, callers, rng, answers_per_kill)
    expected = await callers.ask_all(questions)
    before = server.held_bytes()
    assert not callers.retried
    killing = asyncio.create_task(killer.kill_until_cancelled())
    answers = await callers.ask_all(questions)
    assert not killing.done(), "the killer failed"
    killing.cancel()
    assert answers == expected
    async with asyncio.timeout(START_SECONDS):
        while not server.all_are_ready():
            await asyncio.sleep(0.1)
    retried, callers.retried = callers.retried, Counter()
    assert await callers.ask_all(questions) == expected
    assert not callers.retried
    return Outcome(killer.killed, retried, before, server.held_bytes())


def test_every_caller_gets_one_correct_answer_whichever_process_is_killed(tmp_path: Path) -> None:
    log, options = tmp_path / "log", ["--api-server-count", "2", "--mm-processor-cache-gb", "0.01"]
    with marked_server(log, *options) as server:
        questions = write_questions(50, Random(1))
        outcome = asyncio.run(run_while_killing(server, questions, Random(1), concurrency=8, answers_per_kill=10))
        assert outcome.killed
        server.end_without_a_trace()
    assert "Traceback" not in log.read_text()
