"""The cost of the caches when nothing is ever requested twice: throughput with them on and off, in turn.

    PYTHONPATH=. python benchmarks/zero_reuse.py --model FOLDER [--rounds 5]

Two engines in one process, of which one computes at a time; both get the same requests, all of whose pictures and texts
are new.  Off means no prefix caching, and caches of size 0.  Which engine goes first alternates.  On a noisy machine
these ratios are noisy, too, so the engine loop's work apart from the model, caches included, is also timed by itself.
"""

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workload import to_messages
from keepsight.bench.draw import draw_words, photograph
from keepsight.engine.engine_loop import EngineLoop
from keepsight.llm import LLM
from keepsight.runner.model_runner import ModelRunner
from keepsight.sampling_params import SamplingParams

OFF = {
    "enable_prefix_caching": False,
    "encoder_cache_gb": 0,
    "encoder_host_cache_gb": 0,
    "mm_processor_cache_gb": 0,
}
Conversation = list[dict[str, Any]]


@dataclass(slots=True)
class Times:
    """Seconds of each round: wall-clock time, and processor time of all cores together."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    # Processor time of the engine's loop, without the model.
    deciding: list[float] = field(default_factory=list)


class LoopClock:
    """The processor time of the engines' loops in their steps, without that of the runner."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._count(EngineLoop, "step", 1)
        for name in ("run", "prepare"):  # the computation, and preparing memory while the engine is idle
            self._count(ModelRunner, name, -1)

    def _count(self, owner: type, name: str, sign: int) -> None:
        do = getattr(owner, name)

        def counted(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return do(*args)
            finally:
                self.seconds += sign * (time.thread_time() - began)

        setattr(owner, name, counted)


class NewRequests:
    """Makes requests that are all new."""

    def __init__(self, seed: int) -> None:
        self._rng, self._next_picture = random.Random(seed), seed * 1000

    def take(self, num_requests: int, num_words: int, has_picture: bool) -> list[Conversation]:
        return [self._make(num_words, has_picture) for _ in range(num_requests)]

    def _make(self, num_words: int, has_picture: bool) -> Conversation:
        if not has_picture:
            return to_messages([draw_words(self._rng, num_words)], ())
        self._next_picture += 1
        return to_messages([0, draw_words(self._rng, num_words)], [photograph(self._next_picture)])


def answer(
    llm: LLM, conversations: list[Conversation], max_tokens: int, times: Times, clock: LoopClock
) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    wall, processor, deciding = time.perf_counter(), time.process_time(), clock.seconds
    outputs = llm.chat(conversations, params, use_tqdm=False)
    times.wall.append(time.perf_counter() - wall)
    times.processor.append(time.process_time() - processor)
    times.deciding.append(clock.seconds - deciding)
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def compare(
    engines: dict[str, LLM], new: NewRequests, has_picture: bool, arguments: argparse.Namespace, clock: LoopClock
) -> None:
    times = {name: Times() for name in engines}
    num_requests, num_words = (arguments.requests, 40) if has_picture else (4 * arguments.requests, 400)
    for number in range(-1, arguments.rounds):
        conversations = new.take(num_requests, num_words, has_picture)
        order = list(engines) if number % 2 else list(reversed(engines))
        answers = [answer(engines[name], conversations, arguments.tokens, times[name], clock) for name in order]
        assert answers[0] == answers[1], "a cache changed an answer"
    description = "one picture and 40 words" if has_picture else "400 words"
    print(f"{num_requests} requests of {description}, {arguments.tokens} tokens an answer, {arguments.rounds} rounds:")
    report(times, num_requests)


def report(times: dict[str, Times], num_requests: int) -> None:
    for name, of_engine in times.items():
        rate = num_requests / statistics.median(of_engine.wall[1:])  # the first round warms up
        print(f"    caches {name:4s} {rate:7.2f} requests/s")
    on, off = times["on"], times["off"]
    for name, pairs in {"time": (on.wall, off.wall), "processor time": (on.processor, off.processor)}.items():
        ratios = sorted(a / b for a, b in zip(pairs[0][1:], pairs[1][1:], strict=True))
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"    {name}, on / off: {statistics.median(ratios):.3f}, median of the rounds' ratios, {spread}")
    shares = [(a - b) / c for a, b, c in zip(on.deciding[1:], off.deciding[1:], off.processor[1:], strict=True)]
    each = " / ".join(
        f"{1e3 * statistics.median(engine_times.deciding[1:]) / num_requests:.2f}" for engine_times in (on, off)
    )
    print(f"    deciding, ms a request, on / off: {each}; the caches' part of all processor time: {_percent(shares)}")


def _percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Gemma 3 checkpoint (default: the demo)")
    parser.add_argument("--requests", type=int, default=16, help="with a picture, a round; four times as many without")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    new, clock = NewRequests(arguments.seed), LoopClock()
    with LLM(arguments.model) as on, LLM(arguments.model, **OFF) as off:
        for has_picture in (True, False):
            compare({"on": on, "off": off}, new, has_picture, arguments, clock)


if __name__ == "__main__":
    main()
