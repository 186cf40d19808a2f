"""Runs workloads one after the other against one server, and reports them together."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace

from tqdm import tqdm

from keepsight.bench.ask import Answer, Server, ask
from keepsight.bench.measure import ONE_CLIENT, ClientLoad, Restart, find_words_per_picture, measure
from keepsight.bench.report import GUESS, Report
from keepsight.bench.summary import Summary, summarize
from keepsight.bench.workloads import AS_LONG_AS_A_PICTURE, Workload, WorkloadOptions, draw_workload, label_of
from keepsight.errors import InvalidArgumentError, KeepsightError, NoAnswerError

READY_SECONDS = 600.0
# A command that runs longer has probably become the server itself.
PATIENCE_SECONDS = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSettings:
    workloads: Sequence[str]
    options: WorkloadOptions
    load: ClientLoad = ONE_CLIENT
    # `zipf` is run once for each.
    reuse_percents: Sequence[int] = (80,)
    restart: Restart | None = None


class WorkloadRun:
    """A run of several workloads. Complete results are available at any time, even if the rest fails."""

    def __init__(self, server: Server, settings: RunSettings) -> None:
        self.summaries: dict[str, Summary] = {}
        # Why other workloads could not be measured.
        self.failures: dict[str, str] = {}
        # Why texts may not be as long as a picture, if so.
        self.words_per_picture_error: str | None = None
        self._server, self._settings, self._options = server, settings, settings.options

    @property
    def report(self) -> Report:
        server = self._server
        facts = {"model": server.model, "sampling": dict(server.sampling), **self._settings.load.to_facts()}
        options = asdict(self._options)
        # Each `zipf` run has its own, which is part of its label.
        del options["reuse_percent"]
        guess = {} if self.words_per_picture_error is None else {GUESS: True}
        return Report(facts | options | guess, self.summaries, self.failures)

    async def run(self) -> None:
        """Measure all workloads; one that fails does not stop the others."""
        if not AS_LONG_AS_A_PICTURE.isdisjoint(self._settings.workloads):
            await self._count_words_per_picture()
        for workload, options in self._list_runs():
            label = label_of(workload, options)
            try:
                self.summaries[label] = await self._measure(workload, options)
            except KeepsightError as error:
                self.failures[label] = str(error)

    async def _count_words_per_picture(self) -> None:
        try:
            words = await find_words_per_picture(self._server, self._options)
            self._options = replace(self._options, words_per_picture=words)
        except NoAnswerError as error:
            self.words_per_picture_error = str(error)

    def _list_runs(self) -> Iterator[tuple[str, WorkloadOptions]]:
        for workload in self._settings.workloads:
            percents = self._settings.reuse_percents if workload == "zipf" else [self._options.reuse_percent]
            yield from ((workload, replace(self._options, reuse_percent=percent)) for percent in percents)

    async def _measure(self, workload: str, options: WorkloadOptions) -> Summary:
        settings = self._settings
        drawn = await asyncio.wrap_future(_draw_beside(workload, options))
        # The progress bar is shown only on a terminal.
        with tqdm(desc=workload, total=drawn.num_timed, disable=None, leave=False, unit="request") as bar:

            def keep(_: Answer) -> None:
                bar.update()

            measured = await measure(self._server, drawn, settings.load, keep, settings.restart)
        if not measured.answers:
            raise NoAnswerError("the pictures beside ended before the first timed request: use more --requests")
        return summarize(measured)


def _draw_beside(name: str, options: WorkloadOptions) -> Future[Workload]:
    """Draw in a daemon thread: after Ctrl-C, the exit would wait for a thread pool until everything is drawn."""
    drawn: Future[Workload] = Future()
    drawn.set_running_or_notify_cancel()

    def draw() -> None:
        try:
            drawn.set_result(draw_workload(name, options))
        except BaseException as error:
            drawn.set_exception(error)

    threading.Thread(target=draw, daemon=True).start()
    return drawn


async def restart_by_command(command: str, server: Server) -> None:
    process = await asyncio.create_subprocess_shell(command)
    ended = asyncio.create_task(process.wait())
    await asyncio.wait({ended}, timeout=PATIENCE_SECONDS)
    if not ended.done():
        logger.warning("waiting for --restart-command to end: it must leave the server in the background, as by '&'")
    if status := await ended:
        raise InvalidArgumentError("--restart-command", f"ended with status {status}")
    await wait_until_it_answers(server)


async def wait_until_it_answers(server: Server) -> None:
    """Wait until the server answers a request: readiness endpoints differ between servers, answers do not."""
    deadline = time.monotonic() + READY_SECONDS
    while (answer := await ask(server.for_one_token(), [b'{"role":"user","content":"Hello"}'])).error is not None:
        if time.monotonic() > deadline:
            raise NoAnswerError(f"the server does not answer after the restart: {answer.error}")
        await asyncio.sleep(0.1)
