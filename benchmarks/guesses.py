"""What guessing saves for an answer that repeats text of its prompt, and what it costs for one that does not.

    PYTHONPATH=. python benchmarks/guesses.py --model FOLDER [--answers 1 4] [--runs 6]

Random weights repeat nothing, so a grammar forces each answer to one text: the prompt's own, the same with some words
replaced, or other words.  Two engines in one process, with guesses and without, are measured in turn.
"""

import argparse
import itertools
import random
import re
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.in_turn import time_in_turn
from keepsight.bench.draw import draw_words
from keepsight.llm import LLM
from keepsight.outputs import RequestOutput
from keepsight.sampling_params import SamplingParams
from keepsight.structured_outputs import StructuredOutputsParams

NUM_WORDS, EXCHANGED = 80, 8
GUESSING, PLAIN = "with guesses", "without"


def draw_texts(rng: random.Random) -> dict[str, tuple[str, str]]:
    """Return, by kind, a page for the prompt and the text of the answer."""
    words = draw_words(rng, NUM_WORDS).split()
    others = draw_words(rng, NUM_WORDS).split()
    exchanged = [others[place] if place % EXCHANGED == 0 else word for place, word in enumerate(words)]
    page = " ".join(words)
    return {
        "the same": (page, page),
        f"one word of {EXCHANGED} another": (page, " ".join(exchanged)),
        "other words": (page, " ".join(others)),
    }


def ask(llm: LLM, page: str, answer: str, num_answers: int, *, max_tokens: int = 8 * NUM_WORDS) -> list[RequestOutput]:
    structured = StructuredOutputsParams(regex=re.escape(answer))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=structured)
    return llm.generate([f"{number}: {page}\n\n" for number in range(num_answers)], params, use_tqdm=False)


def measure(llms: Mapping[str, LLM], num_answers: int, num_runs: int) -> None:
    rng = random.Random(0)
    drawn = [draw_texts(rng) for _ in range(num_runs + 1)]
    for kind in drawn[0]:
        given = [each[kind] for each in drawn]
        for llm, pair in itertools.product(llms.values(), given):
            ask(llm, *pair, num_answers, max_tokens=1)  # so that prompts are cached and grammars compiled
        ways = {name: partial(check_answers, llm, num_answers) for name, llm in llms.items()}
        guessing, plain = time_in_turn(ways, given, num_warm_up=1).values()
        num_tokens = [len(ask(llms[PLAIN], *pair, 1)[0].outputs[0].token_ids) for pair in given[1:]]
        spent = [seconds / num_answers / count for seconds, count in zip(guessing, num_tokens, strict=True)]
        ratios = [without / with_ for with_, without in zip(guessing, plain, strict=True)]
        print(
            f"{num_answers} at once, {kind:26s} {statistics.median(spent) * 1000:6.2f} ms a token {GUESSING}, "
            f"{statistics.median(ratios):.2f} times as fast as {PLAIN}"
        )


def check_answers(llm: LLM, num_answers: int, pair: tuple[str, str]) -> None:
    assert all(each.outputs[0].text == pair[1] for each in ask(llm, *pair, num_answers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 4], help="so many at once")
    parser.add_argument("--runs", type=int, default=6)
    arguments = parser.parse_args()
    load = partial(LLM, arguments.model, max_model_len=4096, performance_mode="interactivity")
    llms = {GUESSING: load(), PLAIN: load(guess_up_to=0)}
    for num_answers in arguments.answers:
        measure(llms, num_answers, arguments.runs)


if __name__ == "__main__":
    main()
