"""What guessing saves an answer that repeats what stands in its prompt, and what it costs one that does not.

    PYTHONPATH=. python benchmarks/guesses.py --model FOLDER [--answers 1 4] [--runs 6]

Random weights repeat nothing, so each answer is kept to one text by a grammar: the prompt's own, the same with some
words exchanged, and one whose words the prompt has in another order.  Two engines in one process, with guesses and
without, are asked in turn.
"""

import argparse
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from keepsight.bench.draw import say
from keepsight.llm import LLM
from keepsight.sampling_params import SamplingParams
from keepsight.structured_outputs import StructuredOutputsParams

NUM_WORDS, EXCHANGED = 80, 8
NAMES = {True: "with guesses", False: "without"}


def texts(rng: random.Random) -> dict[str, tuple[str, str]]:
    """Of each kind a page, and what is said of it."""
    words = say(rng, NUM_WORDS).split()
    others = say(rng, NUM_WORDS).split()
    exchanged = [others[place] if place % EXCHANGED == 0 else word for place, word in enumerate(words)]
    page = " ".join(words)
    return {
        "the same": (page, page),
        f"one word of {EXCHANGED} another": (page, " ".join(exchanged)),
        "other words": (page, " ".join(others)),
    }


def seconds_per_token(llm: LLM, page: str, said: str, num_answers: int) -> float:
    forced = StructuredOutputsParams(regex=re.escape(said))
    params = SamplingParams(temperature=0, max_tokens=8 * NUM_WORDS, structured_outputs=forced)
    prompts = [f"{number}: {page}\n\n" for number in range(num_answers)]
    # Prompts are known then, and the grammar is compiled.
    llm.generate(prompts, replace(params, max_tokens=1), use_tqdm=False)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(each.outputs[0].text == said for each in outputs)
    return seconds / sum(len(each.outputs[0].token_ids) for each in outputs)


def measure(llms: dict[bool, LLM], num_answers: int, num_runs: int) -> None:
    rng = random.Random(0)
    ratios: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    for run in range(num_runs + 1):
        for kind, (page, said) in texts(rng).items():
            took = {with_: seconds_per_token(llm, page, said, num_answers) for with_, llm in _in_turn(llms, run)}
            if run:  # the first is for warming up
                ratios.setdefault(kind, []).append(took[False] / took[True])
                spent.setdefault(kind, []).append(took[True])
    for kind, of_kind in ratios.items():
        milliseconds = statistics.median(spent[kind]) * 1000
        print(
            f"{num_answers} at once, {kind:26s} {milliseconds:6.2f} ms a token {NAMES[True]}, "
            f"{statistics.median(of_kind):.2f} times as fast as {NAMES[False]}"
        )


def _in_turn(llms: dict[bool, LLM], run: int) -> Sequence[tuple[bool, LLM]]:
    pairs = list(llms.items())
    return pairs if run % 2 else pairs[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 4], help="so many at once")
    parser.add_argument("--runs", type=int, default=6)
    arguments = parser.parse_args()
    load = partial(LLM, arguments.model, max_model_len=4096, performance_mode="interactivity")
    llms = {True: load(), False: load(guess_up_to=0)}
    for num_answers in arguments.answers:
        measure(llms, num_answers, arguments.runs)


if __name__ == "__main__":
    main()
