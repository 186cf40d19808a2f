"""How evenly answers stream while new pictures keep arriving, compared to the same streams alone.

    PYTHONPATH=. python benchmarks/token_gap.py --model FOLDER [--vllm-python PYTHON] [--encoder-shares 0.25 0.5 0.75]

Some texts are answered without end; then new pictures come one after the other, each sent as soon as the one before is
answered.  A gap is the time between two tokens of one stream, as its reader sees it.  Keepsight's engine runs in this
process (and, as `keepsight serve`, in its server), vLLM in `vllm serve`.
"""

import argparse
import asyncio
import gc
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import MAX_MODEL_LEN, precision_of
from benchmarks.servers import SERVERS, Ask, serve
from benchmarks.workload import Request, to_messages
from keepsight.bench.draw import draw_words, photograph

ENGINES = ("keepsight", *SERVERS)
STREAM_TOKENS = 6000
NUM_WARM_UP_PICTURES, WARM_UP_GAPS, SETTLING_SECONDS = 2, 20, 0.5


@dataclass(frozen=True, slots=True)
class Gap:
    start: float
    end: float

    @property
    def ms(self) -> float:
        return (self.end - self.start) * 1e3


@dataclass(slots=True)
class Findings:
    idle: list[Gap] = field(default_factory=list)
    busy: list[Gap] = field(default_factory=list)
    # Times to the first token of answers about pictures, in ms: without streams, and beside them.
    first_token_alone: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)


# Engines ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def keepsight_in_process(model: Path, encoder_share: float) -> AsyncIterator[Ask]:
    from keepsight.llm import LLM
    from keepsight.sampling_params import SamplingParams

    options: dict[str, Any] = {"encoder_share": encoder_share, "performance_mode": "interactivity"}
    with LLM(model, max_model_len=MAX_MODEL_LEN, dtype=precision_of(model), **options) as llm:
        gc.freeze()  # as in the processes of a server: a full collection takes a tenth of a second

        async def ask(messages: list[dict[str, Any]], max_tokens: int) -> AsyncIterator[None]:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            prepared = await asyncio.to_thread(llm.preparer.prepare_chat, messages, params)
            async with aclosing(llm.engine.generate(prepared)) as tokens:
                async for _ in tokens:
                    yield

        yield ask


# Readers ------------------------------------------------------------------------------------------------------


async def read_along(ask: Ask, request: Request, gaps: list[Gap]) -> None:
    """Read answers and note their gaps until cancelled; an answer that ends is requested again."""
    while True:
        last = None
        async for _ in ask(to_messages(request, ()), STREAM_TOKENS):
            now = time.perf_counter()
            if last is not None:
                gaps.append(Gap(last, now))
            last = now


class Visitor:
    """Asks about new pictures, one after the other.  They are drawn in advance, as this process also reads streams."""

    def __init__(self, ask: Ask, num_pictures: int, num_tokens: int, seed: int) -> None:
        self._ask, self._num_tokens = ask, num_tokens
        rng = random.Random(seed)
        self._waiting = [
            to_messages([0, draw_words(rng, 20)], [photograph(seed * 1000 + number)]) for number in range(num_pictures)
        ]

    async def visit(self, num_pictures: int) -> list[float]:
        """Return the time to the first token of each, in ms."""
        return [await self._time_next() for _ in range(num_pictures)]

    async def _time_next(self) -> float:
        messages, started = self._waiting.pop(), time.perf_counter()
        arrivals = [time.perf_counter() async for _ in self._ask(messages, self._num_tokens)]
        assert 0 < len(arrivals) <= self._num_tokens, len(arrivals)
        return (arrivals[0] - started) * 1e3


class Streams:
    """Texts that are answered without end, and the gaps between their tokens."""

    def __init__(self, ask: Ask, num_streams: int, seed: int) -> None:
        rng = random.Random(seed)
        self._gaps: list[list[Gap]] = [[] for _ in range(num_streams)]
        self._readers = [asyncio.create_task(read_along(ask, [draw_words(rng, 40)], gaps)) for gaps in self._gaps]

    async def run_in(self) -> None:
        while min(map(len, self._gaps)) < WARM_UP_GAPS:
            await asyncio.sleep(0.1)
            for reader in self._readers:
                if reader.done():
                    reader.result()

    def gaps_since(self, started: float) -> list[Gap]:
        """Return the gaps that ended since then, even if they began before."""
        return [gap for gaps in self._gaps for gap in gaps if gap.end > started]

    async def end(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


async def measure(ask: Ask, arguments: argparse.Namespace) -> Findings:
    num_pictures = NUM_WARM_UP_PICTURES + arguments.alone + 1 + arguments.pictures
    visitor = Visitor(ask, num_pictures, arguments.picture_tokens, arguments.seed)
    found = Findings()
    await visitor.visit(NUM_WARM_UP_PICTURES)
    found.first_token_alone = await visitor.visit(arguments.alone)
    streams = Streams(ask, arguments.streams, arguments.seed)
    await streams.run_in()
    await visitor.visit(1)

    async def measure_idle() -> None:
        await asyncio.sleep(SETTLING_SECONDS)
        started = time.perf_counter()
        await asyncio.sleep(arguments.idle_seconds)
        found.idle += streams.gaps_since(started)

    await measure_idle()
    started = time.perf_counter()
    found.first_token = await visitor.visit(arguments.pictures)
    found.busy = streams.gaps_since(started)
    await measure_idle()  # before and after: a longer answer has slower tokens
    await streams.end()
    return found


def describe(values: Sequence[float]) -> str:
    ordered = sorted(values)
    p99 = ordered[int(len(ordered) * 0.99)]
    return f"median {statistics.median(ordered):8.1f}  p99 {p99:8.1f}  longest {ordered[-1]:8.1f} ms  ({len(ordered)})"


def report(name: str, found: Findings) -> None:
    idle, busy = [gap.ms for gap in found.idle], [gap.ms for gap in found.busy]
    limit = 2 * statistics.median(idle) + 20
    print(f"{name}\n    gaps, idle                    {describe(idle)}")
    print(f"    gaps, pictures arriving       {describe(busy)}")
    late = sum(gap > limit for gap in busy) / len(busy)
    print(f"    longest, over the median idle {max(busy) / statistics.median(idle):8.1f}", end="; ")
    print(f"above twice that and 20 ms ({limit:.1f}): {late:.2%} of the gaps")
    print(f"    first token, no streams       {describe(found.first_token_alone)}")
    print(f"    first token, beside streams   {describe(found.first_token)}", flush=True)


async def run(arguments: argparse.Namespace) -> None:
    model = arguments.model
    if "keepsight" in arguments.engines:
        for share in arguments.encoder_shares:
            async with keepsight_in_process(model, share) as ask:
                report(f"keepsight, encoder_share {share}", await measure(ask, arguments))
    for name in [name for name in arguments.engines if name in SERVERS]:
        if name != "vllm-serve" or arguments.vllm_python:
            async with serve(name, model, arguments.vllm_python) as ask:
                report(name, await measure(ask, arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Gemma 3 checkpoint")
    parser.add_argument("--vllm-python", help="the interpreter of an environment that has vLLM; without it, no vLLM")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--encoder-shares", type=float, nargs="+", default=[0.5], help="of Keepsight in this process")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=8)
    parser.add_argument("--picture-tokens", type=int, default=4, help="of each answer about a picture")
    parser.add_argument("--alone", type=int, default=3, help="pictures to measure before the streams begin")
    parser.add_argument("--idle-seconds", type=float, default=5, help="twice: before and after the pictures")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(
        f"{arguments.model.name}: {arguments.streams} streams, {arguments.pictures} pictures of 1024x1024 one after "
        f"the other, answers of {arguments.picture_tokens} tokens, seed {arguments.seed}"
    )
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
