"""Asks a server a workload: what is to be known first, then, on the clock, by so many clients at a time.

A client asks its next request when it has its answer (a closed loop), or a drawn pause later.  Conversations are sent
again whole, with the server's own answers, at every turn.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from keepsight.bench.ask import Answer, Server, ask
from keepsight.bench.workloads import Conversation, Drawer, Part, Workload, WorkloadOptions, once
from keepsight.errors import NoAnswerError

Keep = Callable[[Answer], None]
Restart = Callable[[], Awaitable[None]]
_PROBE_WORDS = 200


@dataclass(frozen=True, slots=True)
class Measurement:
    answers: list[Answer]
    seconds: float


async def measure(
    server: Server, workload: Workload, concurrency: int, keep: Keep, restart: Restart | None = None
) -> Measurement:
    """`keep` sees each timed answer as it ends."""
    await _converse_all(server, iter(workload.before), _insist)
    if workload.restarts_before_timed:
        assert restart is not None
        await restart()
    answers: list[Answer] = []

    def note(answer: Answer) -> None:
        answers.append(answer)
        keep(answer)

    started, over = time.perf_counter(), asyncio.Event()
    conversations = iter(workload.timed)
    clients = [asyncio.create_task(_converse_all(server, conversations, note, over)) for _ in range(concurrency)]
    try:
        if workload.beside:
            await _converse_all(server, iter(workload.beside), _insist)
            over.set()
        # Those under way are waited for: the slowest must not be the ones that do not count.
        await asyncio.gather(*clients)
        return Measurement(answers, time.perf_counter() - started)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _converse_all(
    server: Server, conversations: Iterator[Conversation], keep: Keep, over: asyncio.Event | None = None
) -> None:
    """Until there are no more, or no more are to be begun."""
    for conversation in conversations:
        await asyncio.sleep(conversation.pause_seconds)
        if over is not None and over.is_set():
            return
        async for answer in _converse(server, conversation):
            keep(answer)


async def _converse(server: Server, conversation: Conversation) -> AsyncIterator[Answer]:
    """An error ends the conversation."""
    messages: list[bytes] = []
    for turn in conversation.turns:
        messages.append(b'{"role":"user","content":[%s]}' % b",".join(turn))
        answer = await ask(server, messages)
        yield answer
        if answer.error is not None:
            return
        messages.append(json.dumps({"role": "assistant", "content": answer.text}).encode())


def _insist(answer: Answer) -> None:
    """What is only preparation must not fail in silence."""
    if answer.error is not None:
        raise NoAnswerError(f"a request before or beside the timed ones failed: {answer.error}")


async def find_words_per_picture(server: Server, options: WorkloadOptions) -> int:
    """How many words take as many tokens of a prompt as one picture does."""
    probe = replace(server, sampling={**server.sampling, "max_tokens": 1})
    draw = Drawer("words per picture", options)
    short, long = draw.words(), draw.words(_PROBE_WORDS)

    async def count(*parts: Part) -> int:
        async for answer in _converse(probe, once(*parts)):
            _insist(answer)
            if answer.num_prompt_tokens:
                return answer.num_prompt_tokens
        raise NoAnswerError("the server does not say how many tokens a prompt has")

    num_short = await count(short)
    num_of_words = await count(short, long) - num_short
    if num_of_words <= 0:
        raise NoAnswerError("the server counts no more tokens of a prompt with more words")
    return max(1, round((await count(draw.picture(), short) - num_short) * _PROBE_WORDS / num_of_words))
