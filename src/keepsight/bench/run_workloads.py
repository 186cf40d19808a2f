"""Workload after workload against one server, into one report."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from tqdm import tqdm

from keepsight.bench.ask import Answer, Server, ask
from keepsight.bench.measure import Restart, find_words_per_picture, measure
from keepsight.bench.report import Report
from keepsight.bench.summary import Summary, summarize
from keepsight.bench.workloads import AS_LONG_AS_A_PICTURE, WorkloadOptions, draw_workload
from keepsight.errors import InvalidArgumentError, NoAnswerError

READY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RunSettings:
    workloads: Sequence[str]
    options: WorkloadOptions
    concurrency: int = 1
    # `zipf` is run once for each.
    reuse_percents: Sequence[int] = (80,)
    restart: Restart | None = None


async def run_workloads(server: Server, settings: RunSettings) -> Report:
    options = settings.options
    if AS_LONG_AS_A_PICTURE.intersection(settings.workloads):
        options = replace(options, words_per_picture=await find_words_per_picture(server, options))
    summaries: dict[str, Summary] = {}
    for name in settings.workloads:
        if name == "zipf":
            for percent in settings.reuse_percents:
                at_percent = replace(options, reuse_percent=percent)
                summaries[f"zipf-{percent}"] = await _run(server, name, at_percent, settings)
        else:
            summaries[name] = await _run(server, name, options, settings)
    facts = {"model": server.model, "sampling": dict(server.sampling), "concurrency": settings.concurrency}
    return Report(facts | asdict(options), summaries)


async def _run(server: Server, name: str, options: WorkloadOptions, settings: RunSettings) -> Summary:
    workload = await asyncio.to_thread(draw_workload, name, options)
    # A bar on a terminal, nothing elsewhere.
    with tqdm(desc=name, total=options.num_requests, disable=None, leave=False, unit="request") as bar:

        def keep(_: Answer) -> None:
            bar.update()

        return summarize(await measure(server, workload, settings.concurrency, keep, settings.restart))


async def restart_by_command(command: str, server: Server) -> None:
    process = await asyncio.create_subprocess_shell(command)
    if status := await process.wait():
        raise InvalidArgumentError("--restart-command", f"ended with status {status}")
    await wait_until_it_answers(server)


async def wait_until_it_answers(server: Server) -> None:
    """Servers say that they are ready at different places; an answer is the same everywhere."""
    probe = replace(server, sampling={**server.sampling, "max_tokens": 1})
    deadline = time.monotonic() + READY_SECONDS
    while (answer := await ask(probe, [b'{"role":"user","content":"Hello"}'])).error is not None:
        if time.monotonic() > deadline:
            raise NoAnswerError(f"the server did not come up again: {answer.error}")
        await asyncio.sleep(0.1)
