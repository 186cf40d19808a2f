"""Asks a server for the answers to a batch's requests, a bounded number at a time, and writes each as it comes."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from keepsight.batch.batch_lines import Request, answer_line, error_line
from keepsight.batch.output_file import OutputFile
from keepsight.batch.silence_watch import SilenceWatch
from keepsight.bench.address import Address
from keepsight.bench.http_connection import connecting
from keepsight.errors import NoAnswerError

MOST_ATTEMPTS = 5
# They double from attempt to attempt, unless the server says how long to wait.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 8.0


@dataclass(frozen=True, slots=True)
class Server:
    address: Address
    api_key: str | None
    # Whether it is ending: what it has not answered then is left.
    is_ending: Callable[[], bool] = lambda: False
    # Bounds on requests under way: how many, and the bytes of all bodies, but one may have any size.
    max_requests: int = 512
    max_bytes: int = 400 * 2**20


@dataclass(slots=True)
class Tally:
    by_status: Counter[int] = field(default_factory=Counter)
    num_errors: int = 0
    # Answered by an earlier run.
    num_kept: int = 0
    # None until the first line is read.
    is_whole: bool | None = None

    def __str__(self) -> str:
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(self.by_status.items()))
        parts = [f"{self.by_status.total()} answered" + (f" ({statuses})" if statuses else "")]
        parts += [f"{self.num_errors} with an error"] if self.num_errors else []
        return ", ".join(parts + ([f"{self.num_kept} answered before"] if self.num_kept else []))


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_final(self) -> bool:
        """False if OpenAI's clients would ask again."""
        return self.status < 500 and self.status not in (408, 409, 429)

    @property
    def has_lost_engines(self) -> bool:
        """Several were lost with this request: it may be the cause, or was only beside the one that is."""
        return not self.is_final and b'"engine_lost"' in self.body


class BatchAnswerer:
    def __init__(self, server: Server, output: OutputFile, tally: Tally, note: Callable[[], object]) -> None:
        """`note` is called after each line that is written or left out."""
        self._server, self._output, self._tally, self._note = server, output, tally, note
        self._headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._silence = SilenceWatch(server.address, self._headers)
        # Requests that were under way when engines were lost, with what was said to them.
        self._lost: list[tuple[Request, _Answer]] = []
        # With the size of each request.
        self._running: dict[asyncio.Task[None], int] = {}
        self._is_cut = False
        # Nobody waits for lines any more.
        self.has_ended = False

    async def run(self, lines: Iterator[Request | bytes]) -> None:
        """Raise NoAnswerError if the server cannot be reached (any more)."""
        self._tally.is_whole = False
        watch = asyncio.create_task(self._silence.run())
        try:
            while (line := await self._read(lines)) is not None:
                if self._server.is_ending():  # what was read may be half a line
                    break
                if isinstance(line, bytes):
                    self._write(line)
                elif line.custom_id in self._output.answered:
                    self._tally.num_kept += 1
                    self._note()
                else:
                    await self._begin(line)
            self._is_cut |= self._server.is_ending()
            await self._finish()
            self._tally.is_whole = not self._is_cut
        finally:
            self.has_ended = True
            tasks = [*self._running, watch]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, lines: Iterator[Request | bytes]) -> Request | bytes | None:
        """Return the next line, or None after the last. It may come from a pipe whose writer waits for answers."""
        reading = asyncio.create_task(asyncio.to_thread(next, lines, None))
        while not reading.done():
            await self._wait_for_one(reading)
            if self._lost:
                await self._finish()
        return reading.result()

    async def _begin(self, request: Request) -> None:
        while self._running and (
            len(self._running) >= self._server.max_requests
            or sum(self._running.values()) + len(request.body) > self._server.max_bytes
        ):
            await self._wait_for_one()
        if self._lost:
            await self._finish()
        self._start(request)

    def _start(self, request: Request) -> None:
        self._running[asyncio.create_task(self._answer(request))] = len(request.body)

    async def _finish(self) -> None:
        """Wait for all that is under way, and ask again for what was lost with engines: one request, then 2, 4, 8, ...

        If that ends engines again, one of these requests is the cause. Each of them is asked alone then, until it is
        found: the others are answered, and it ends no more engines.
        """
        await self._wait_for_all()
        num_together, num_suspects = 1, 0
        while self._lost:
            group, others, self._lost = self._lost[:num_together], self._lost[num_together:], []
            for request, _ in group:
                self._start(request)
            await self._wait_for_all()
            if self._lost:
                if len(group) == 1:  # the cause is found
                    self._write_answer(*self._lost.pop())
                num_together, num_suspects = 1, len(self._lost)
            elif num_suspects:
                num_suspects -= 1
            else:
                num_together *= 2
            self._lost += others

    async def _wait_for_all(self) -> None:
        while self._running:
            await self._wait_for_one()

    async def _wait_for_one(self, *or_for: asyncio.Task[Any]) -> None:
        done, _ = await asyncio.wait({*self._running, *or_for}, return_when=asyncio.FIRST_COMPLETED)
        for task in done.difference(or_for):
            del self._running[task]
            task.result()

    def _write(self, line: bytes, status: int | None = None) -> None:
        """`status`: that of an answer; None for an error."""
        self._output.write(line)
        if status is None:
            self._tally.num_errors += 1
        else:
            self._tally.by_status[status] += 1
        self._note()

    def _write_answer(self, request: Request, answer: _Answer) -> None:
        request_id = answer.headers.get("x-request-id")
        self._write(answer_line(request.custom_id, answer.status, request_id, answer.body), answer.status)

    async def _answer(self, request: Request) -> None:
        outcome = await self._ask_until_final(request)
        if isinstance(outcome, _Answer):
            if outcome.has_lost_engines:
                self._lost.append((request, outcome))
            else:
                self._write_answer(request, outcome)
        elif outcome is None:
            self._is_cut = True
        elif outcome.is_unreachable:
            raise outcome
        else:
            reason = f"no answer came in {MOST_ATTEMPTS} attempts: {outcome}"
            self._write(error_line(request.number, request.custom_id, "no_answer", reason))

    async def _ask_until_final(self, request: Request) -> _Answer | NoAnswerError | None:
        """Return None if the server ends before it has an answer."""
        for attempt in range(1, MOST_ATTEMPTS + 1):
            outcome = await self._ask(request)
            if isinstance(outcome, _Answer) and outcome.is_final:
                return outcome
            if self._server.is_ending():
                return None
            if attempt == MOST_ATTEMPTS or (isinstance(outcome, _Answer) and outcome.has_lost_engines):
                break
            await asyncio.sleep(_pause_after(outcome, attempt))
        return outcome

    async def _ask(self, request: Request) -> _Answer | NoAnswerError:
        address, connection = self._server.address, None
        try:
            async with self._silence.patiently(), connecting(address) as connection:
                response = await connection.post(request.url.removeprefix("/v1"), request.body, self._headers)
                return _Answer(response.status, response.headers, await response.read())
        except (OSError, EOFError, ValueError, NoAnswerError) as error:
            is_unreachable = connection is None or (isinstance(error, NoAnswerError) and error.is_unreachable)
            return NoAnswerError(f"{address.url}: {error or type(error).__name__}", is_unreachable)


def _pause_after(outcome: _Answer | NoAnswerError, attempt: int) -> float:
    """Return what the server says, or longer each time, and never the same for all."""
    seconds: float = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1)
    if isinstance(outcome, _Answer):
        with suppress(ValueError):
            seconds = float(outcome.headers.get("retry-after", seconds))
    return min(max(0.0, seconds), LONGEST_PAUSE_SECONDS) * random.uniform(0.75, 1.0)
