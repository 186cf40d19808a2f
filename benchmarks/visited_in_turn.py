"""Twelve pictures visited in turn, twice: the second round should find every one of them encoded.

    PYTHONPATH=. python benchmarks/visited_in_turn.py --model FOLDER [--vllm-python PYTHON] [--pictures 12]

One request at a time with a one-token answer, so its time is the time to first token; default settings.  New words
precede the picture at every visit, so only its embeddings can be reused.  Offline, Keepsight's encodings are counted in
its plans; vLLM does not report them, but its times show them, and its defaults differ between offline and served use.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path

from benchmarks.peers import BatchResult, measure
from benchmarks.servers import SERVERS, serve
from benchmarks.workload import Request, Workload, to_messages
from keepsight.bench.draw import draw_words, photograph

ENGINES = ("keepsight", "vllm", *SERVERS)


def make_workload(num_pictures: int, num_rounds: int, seed: int) -> Workload:
    rng = random.Random(seed)
    warm_up: list[list[Request]] = [[[draw_words(rng, 40), num_pictures]], [[draw_words(rng, 40), num_pictures]]]
    visits: list[list[Request]] = [
        [[draw_words(rng, 40), number]] for _ in range(num_rounds) for number in range(num_pictures)
    ]
    pictures = [photograph(seed * 1000 + number) for number in range(num_pictures + 1)]
    return Workload([*warm_up, *visits], pictures, max_tokens=1)


async def measure_served(name: str, workload: Workload, arguments: argparse.Namespace) -> list[BatchResult]:
    results = []
    async with serve(name, arguments.model, arguments.vllm_python) as ask:
        for [request] in workload.batches:
            messages, started = to_messages(request, workload.pictures), time.perf_counter()
            num_tokens = len([token async for token in ask(messages, workload.max_tokens)])
            assert num_tokens == workload.max_tokens, num_tokens
            results.append(BatchResult(time.perf_counter() - started, []))
    return results


def report(name: str, results: list[BatchResult], num_pictures: int) -> None:
    rounds = [results[start : start + num_pictures] for start in range(2, len(results), num_pictures)]
    for number, visits in enumerate(rounds):
        times = sorted(visit.seconds * 1e3 for visit in visits)
        counts = [visit.num_encoded for visit in visits if visit.num_encoded is not None]
        encoded = f"{sum(counts)} of {num_pictures} encoded" if counts else "encodings not told"
        median = statistics.median(times)
        print(
            f"{name:15s} round {number + 1}: first token median {median:7.1f} ms, longest {times[-1]:7.1f}; {encoded}"
        )
    first, second = (statistics.median(visit.seconds for visit in visits) for visits in rounds[:2])
    print(f"{name:15s} round 2 / round 1: {second / first:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Gemma 3 checkpoint")
    parser.add_argument("--vllm-python", help="the interpreter of an environment that has vLLM; without it, no vLLM")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = make_workload(arguments.pictures, num_rounds=2, seed=arguments.seed)
    print(f"{arguments.model.name}: {arguments.pictures} pictures of 1024x1024 in turn, twice, seed {arguments.seed}")
    pythons = {"keepsight": sys.executable, "vllm": arguments.vllm_python}
    for name in arguments.engines:
        if name.startswith("vllm") and arguments.vllm_python is None:
            continue
        if name in SERVERS:
            results = asyncio.run(measure_served(name, workload, arguments))
        else:
            results = measure(name, pythons[name], arguments.model, workload)
        report(name, results, arguments.pictures)


if __name__ == "__main__":
    main()
