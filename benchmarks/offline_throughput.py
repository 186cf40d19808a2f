"""Mixed requests that share pictures, answered offline by Keepsight, transformers and vLLM, in turn.

    PYTHONPATH=. python benchmarks/offline_throughput.py --model FOLDER [--vllm-python PYTHON] [--rounds 3]

Texts with none to three 1024x1024 JPEGs from a pool whose popularity follows Zipf's law, greedy answers of one length,
float32, all caches at their defaults.  Each engine runs alone, in a process of its own; loading and a first batch of
other requests and pictures are not counted.  transformers gets batches of 8, padded on the left.  The answers are
compared afterwards, with Keepsight's computed from the same pixels as transformers' in this environment.
"""

import argparse
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.peers import Answer, measure
from benchmarks.workload import Workload, mixed_requests
from keepsight.bench.draw import photograph

ENGINES = ("keepsight", "transformers", "vllm")
NUM_WARM_UP_REQUESTS, NUM_WARM_UP_PICTURES = 8, 4


def make_workload(arguments: argparse.Namespace) -> Workload:
    pool = [photograph(arguments.seed * 1000 + number) for number in range(arguments.pictures + NUM_WARM_UP_PICTURES)]
    timed = mixed_requests(arguments.requests, arguments.pictures, arguments.zipf, arguments.seed)
    others = mixed_requests(NUM_WARM_UP_REQUESTS, NUM_WARM_UP_PICTURES, 1.0, arguments.seed + 1)
    # The warm-up's pictures come after the pool's.
    warm_up = [[part + arguments.pictures if isinstance(part, int) else part for part in each] for each in others]
    return Workload([warm_up, timed], pool, arguments.tokens)


def print_agreement(name: str, answers: list[Answer], truth: list[Answer]) -> None:
    lengths = all(
        (a.num_prompt_tokens, len(a.token_ids)) == (b.num_prompt_tokens, len(b.token_ids))
        for a, b in zip(answers, truth, strict=True)
    )
    num_equal = sum(a.token_ids == b.token_ids for a, b in zip(answers, truth, strict=True))
    comparison = "equal" if lengths else "DIFFERENT"
    print(f"{name:13s} token counts {comparison} to transformers', {num_equal} of {len(truth)} answers the same ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Gemma 3 checkpoint")
    parser.add_argument("--vllm-python", help="the interpreter of an environment that has vLLM; without it, no vLLM")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--pictures", type=int, default=16, help="how many there are to choose from")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the pictures' popularity")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workload = make_workload(arguments)
    describe(workload, arguments)
    pythons = dict.fromkeys(ENGINES, sys.executable) | {"vllm": arguments.vllm_python}
    rates: dict[str, list[float]] = {}
    answers: dict[str, list[Answer]] = {}
    for name in [name for _ in range(arguments.rounds) for name in arguments.engines if pythons[name] is not None]:
        timed = measure(name, pythons[name], arguments.model, workload)[1]
        rates.setdefault(name, []).append(len(timed.answers) / timed.seconds)
        answers[name] = timed.answers
        print(f"    {name:12s} {timed.seconds:8.2f} s", flush=True)
    report_rates(rates)
    if "transformers" in answers:
        report_answers(answers, arguments.model, workload)


def describe(workload: Workload, arguments: argparse.Namespace) -> None:
    shown = [part for request in workload.batches[1] for part in request if isinstance(part, int)]
    print(
        f"{arguments.model.name}: {arguments.requests} requests, seed {arguments.seed}; {len(shown)} pictures shown, "
        f"{len(set(shown))} different, Zipf {arguments.zipf}; {arguments.tokens} tokens an answer; "
        f"{arguments.rounds} rounds"
    )


def report_rates(rates: dict[str, list[float]]) -> None:
    for name, of_engine in rates.items():
        listed = ", ".join(f"{rate:.2f}" for rate in of_engine)
        print(f"{name:12s} {statistics.median(of_engine):7.2f} requests/s, median of {listed}")
    for name in [name for name in rates if name != "keepsight" and "keepsight" in rates]:
        ratios = [ours / theirs for ours, theirs in zip(rates["keepsight"], rates[name], strict=True)]
        print(f"keepsight / {name}: {statistics.median(ratios):.2f}, median of the rounds' ratios")


def report_answers(answers: dict[str, list[Answer]], model: Path, workload: Workload) -> None:
    truth = answers.pop("transformers")
    if "keepsight" in answers and find_spec("torchvision") is None:
        answers["keepsight-pil"] = measure("keepsight-pil", sys.executable, model, workload)[1].answers
    for name, of_engine in answers.items():
        print_agreement(name, of_engine, truth)


if __name__ == "__main__":
    main()
