"""Sends a workload to a server: first the requests that make content known, then the timed ones, by several clients.

A client sends its next request when it has its answer (a closed loop), or a random pause later; or new clients arrive,
as at a server with many users, whether or not the others have their answers (an open loop). At every turn, the whole
conversation is sent again, with the server's own answers.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from keepsight.bench.ask import Answer, Server, ask
from keepsight.bench.workloads import Conversation, Drawer, Part, Workload, WorkloadOptions, once
from keepsight.errors import NoAnswerError

Keep = Callable[[Answer], None]
Restart = Callable[[], Awaitable[None]]
_PROBE_WORDS = 200


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """A fixed number of clients, or a rate of new clients, which arrive as a Poisson process."""

    concurrency: int = 1
    # None: the same clients send requests again and again.
    new_per_second: float | None = None
    # The seed for the arrival times.
    seed: int = 0

    def to_facts(self) -> dict[str, float]:
        """Return the flag that was given, for the report."""
        if self.new_per_second is None:
            return {"concurrency": self.concurrency}
        return {"request_rate": self.new_per_second}


ONE_CLIENT = ClientLoad()


@dataclass(frozen=True, slots=True)
class Measurement:
    answers: list[Answer]
    seconds: float


async def measure(
    server: Server, workload: Workload, load: ClientLoad, keep: Keep, restart: Restart | None = None
) -> Measurement:
    """Measure a workload. `keep` is called with each timed answer as it ends."""
    over = asyncio.Event()
    await _converse_all(server, iter(workload.before), _raise_on_error, over)
    if workload.restarts_before_timed:
        assert restart is not None
        await restart()
    answers: list[Answer] = []

    def note(answer: Answer) -> None:
        answers.append(answer)
        keep(answer)

    started, conversations = time.perf_counter(), iter(workload.timed)
    if load.new_per_second is None:
        asking = [_converse_all(server, conversations, note, over) for _ in range(load.concurrency)]
    else:
        asking = [_arrive(server, conversations, note, over, draw_gaps(load.new_per_second, load.seed))]
    clients = [asyncio.create_task(each) for each in asking]
    try:
        if workload.beside:
            await _converse_all(server, iter(workload.beside), _raise_on_error, over)
            over.set()
        # Wait for the requests under way: otherwise the slowest ones would not count.
        await asyncio.gather(*clients)
        return Measurement(answers, time.perf_counter() - started)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _converse_all(server: Server, conversations: Iterator[Conversation], keep: Keep, over: asyncio.Event) -> None:
    """Hold conversations until there are no more, or `over` is set."""
    for conversation in conversations:
        if await _is_over_within(conversation.pause_seconds, over):
            return
        await _converse(server, conversation, keep)


async def _arrive(
    server: Server, conversations: Iterator[Conversation], keep: Keep, over: asyncio.Event, gaps: Iterator[float]
) -> None:
    """Start each conversation as a new client, without waiting for the others."""
    due = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for conversation, gap in zip(conversations, gaps, strict=False):
            # Absolute times: the time that this loop itself takes must not lower the rate.
            due += gap
            if await _is_over_within(due - time.perf_counter(), over):
                return
            clients.create_task(_converse(server, conversation, keep))


async def _is_over_within(seconds: float, over: asyncio.Event) -> bool:
    """Pause for `seconds` and return False, or return True as soon as `over` is set."""
    try:
        async with asyncio.timeout(seconds):
            return await over.wait()
    except TimeoutError:
        return False


def draw_gaps(new_per_second: float, seed: int) -> Iterator[float]:
    rng = random.Random(f"{seed} arrivals")
    while True:
        yield rng.expovariate(new_per_second)


async def _converse(server: Server, conversation: Conversation, keep: Keep) -> None:
    """Hold one conversation; an error ends it."""
    messages: list[bytes] = []
    for turn in conversation.turns:
        messages.append(b'{"role":"user","content":[%s]}' % b",".join(turn))
        answer = await ask(server, messages)
        keep(answer)
        if answer.error is not None:
            return
        messages.append(json.dumps({"role": "assistant", "content": answer.text}).encode())


def _raise_on_error(answer: Answer) -> None:
    """Raise if an untimed request failed: preparation must not fail silently."""
    if answer.error is not None:
        raise NoAnswerError(f"a request before or beside the timed ones failed: {answer.error}")


async def find_words_per_picture(server: Server, options: WorkloadOptions) -> int:
    """Return how many words take as many tokens as one picture. NoAnswerError: the server does not report tokens."""
    draw = Drawer("words per picture", options)
    short, long = draw.words(), draw.words(_PROBE_WORDS)

    async def count(*parts: Part) -> int:
        answers: list[Answer] = []
        await _converse(server.for_one_token(), once(*parts), answers.append)
        _raise_on_error(answers[0])
        if not answers[0].num_prompt_tokens:
            raise NoAnswerError("the server does not report how many tokens a prompt has")
        return answers[0].num_prompt_tokens

    num_short = await count(short)
    num_of_words = await count(short, long) - num_short
    if num_of_words <= 0:
        raise NoAnswerError("the server does not count more tokens for a longer prompt")
    return max(1, round((await count(draw.picture(), short) - num_short) * _PROBE_WORDS / num_of_words))
