"""How long a question waits while another client's very long prompt is prefilled, with and without a running stream.

    PYTHONPATH=. python benchmarks/behind_a_book.py --model FOLDER [--vllm-python PYTHON]

No request is repeated.  The question is sent a little after the book, whose prefill has then begun.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

from benchmarks.servers import SERVERS, Ask, serve
from benchmarks.token_gap import read_along
from benchmarks.workload import to_messages
from keepsight.bench.draw import draw_words

AFTER_SECONDS = 0.15


class FirstTokens(NamedTuple):
    """Times to the first token, in seconds."""

    question_alone: float
    question: float
    book: float


async def time_first_token(ask: Ask, text: str) -> float:
    started = time.perf_counter()
    async with aclosing(ask(to_messages([text], ()), 2)) as tokens:  # type: ignore[type-var]
        await anext(aiter(tokens))
        return time.perf_counter() - started


async def ask_behind(ask: Ask, rng: random.Random, words: int, book_words: int) -> FirstTokens:
    alone = await time_first_token(ask, draw_words(rng, words))
    book = asyncio.create_task(time_first_token(ask, draw_words(rng, book_words)))
    await asyncio.sleep(AFTER_SECONDS)
    question = await time_first_token(ask, draw_words(rng, words))
    return FirstTokens(alone, question, await book)


async def measure(ask: Ask, arguments: argparse.Namespace, *, has_stream: bool) -> Sequence[FirstTokens]:
    rng = random.Random(arguments.seed + has_stream)
    reader = asyncio.create_task(read_along(ask, [draw_words(rng, 20)], [])) if has_stream else None
    await asyncio.sleep(1)
    found = [await ask_behind(ask, rng, arguments.words, arguments.book_words) for _ in range(arguments.rounds + 1)]
    if reader is not None:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    return found[1:]


async def run(arguments: argparse.Namespace) -> None:
    for name in SERVERS:
        if name == "vllm-serve" and arguments.vllm_python is None:
            continue
        async with serve(name, arguments.model, arguments.vllm_python) as ask:
            for has_stream in (False, True):
                found = await measure(ask, arguments, has_stream=has_stream)
                alone, question, book = (statistics.median(each) * 1e3 for each in zip(*found, strict=True))
                where = "beside a stream" if has_stream else "no stream"
                times = (
                    f"first token, ms: question alone {alone:.0f}, behind a book {question:.0f}, the book {book:.0f}"
                )
                print(f"{name}, {where}: {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Gemma 3 checkpoint")
    parser.add_argument("--vllm-python", help="the interpreter of an environment that has vLLM; without it, no vLLM")
    parser.add_argument("--words", type=int, default=60, help="of a question")
    parser.add_argument("--book-words", type=int, default=7800)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
