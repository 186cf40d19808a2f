"""Time to the first token of questions about pictures, and of texts, that arrive while films are being processed.

    PYTHONPATH=. python benchmarks/behind_films.py --model FOLDER [--vllm-python PYTHON] [--films 5] [--seconds 60]

Needs a model that takes films (`make_checkpoint.py tiny-qwen3-vl FOLDER`).  All films are sent at once, all of them
new; a second later a picture and a text, and again every half second.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.films import ask_about, ask_servers, draw_film, time_first_token
from keepsight.bench.draw import draw_photograph, draw_words
from tests.drawn import ask, by_url

NUM_LATER, FIRST_AFTER_SECONDS, EACH_SECONDS = 3, 1.0, 0.5


async def measure(films: Sequence[bytes], client: httpx.AsyncClient) -> None:
    (warm, *films), rng = films, random.Random(0)
    for messages in (ask_about(warm, draw_words(rng, 12)), _ask_about_picture(0, "What is it?")):
        await time_first_token(client, messages)
    about_films = [_ask_later(client, 0.0, ask_about(film, draw_words(rng, 12))) for film in films]
    later = [FIRST_AFTER_SECONDS + EACH_SECONDS * number for number in range(NUM_LATER)]
    pictures = [
        _ask_later(client, wait, _ask_about_picture(number, draw_words(rng, 12)))
        for number, wait in enumerate(later, start=1)
    ]
    texts = [_ask_later(client, wait, [{"role": "user", "content": draw_words(rng, 12)}]) for wait in later]
    groups = (asyncio.gather(*each) for each in (pictures, texts, about_films))
    print("first token, ms, median: ", end="")
    for name, took in zip(("pictures", "texts", "films"), await asyncio.gather(*groups), strict=True):
        print(f"{name} {statistics.median(took):.0f}, last {max(took):.0f}", end="; ")
    print(flush=True)


def _ask_about_picture(seed: int, question: str) -> list[dict[str, Any]]:
    return ask(by_url(draw_photograph(seed, 480, 320)), question)


async def _ask_later(client: httpx.AsyncClient, seconds: float, messages: list[dict[str, Any]]) -> float:
    await asyncio.sleep(seconds)
    return await time_first_token(client, messages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python")
    parser.add_argument("--films", type=int, default=5, help="beside one to warm up (default: 5)")
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    films = [draw_film(seed, arguments.seconds, 640, 360) for seed in range(arguments.films + 1)]
    asyncio.run(ask_servers(arguments, partial(measure, films)))


if __name__ == "__main__":
    main()
