"""Time to the first token of a question about a film: never seen, known, and known with another question.

    PYTHONPATH=. python benchmarks/films.py --model FOLDER [--vllm-python PYTHON] [--seconds 20] [--size 640x360]

Needs a model that takes films (`make_checkpoint.py tiny-qwen3-vl FOLDER`).  Each server chooses the frames that the
model sees, so the tokens of its prompt are printed, too.
"""

import argparse
import asyncio
import io
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np

from benchmarks.servers import SERVERS, ServerProcess, ask_greedily
from keepsight.bench.draw import draw_words
from tests.drawn import to_data_url

RATE = 30
ANSWER_TOKENS = 4
# Returns the messages that ask about a file, with a given question.
Ask = Callable[[bytes, str], list[dict[str, Any]]]
Measure = Callable[[httpx.AsyncClient], Awaitable[None]]


def draw_film(seed: int, seconds: int, width: int, height: int) -> bytes:
    """Return an MP4 of a moving pattern."""
    rng, encoded = np.random.default_rng(seed), io.BytesIO()
    tiles = rng.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with av.open(encoded, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=RATE, options={"preset": "ultrafast"})
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(seconds * RATE):
            frame = np.ascontiguousarray(np.roll(tiles, 2 * number, 1)[:height, :width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        container.mux(stream.encode())
    return encoded.getvalue()


def ask_about(film: bytes, question: str) -> list[dict[str, Any]]:
    url = {"type": "video_url", "video_url": {"url": to_data_url(film, "video/mp4")}}
    return [{"role": "user", "content": [url, {"type": "text", "text": question}]}]


async def time_first_token(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> float:
    """Return the time to the first token in milliseconds; the answer is read to its end."""
    started, first = time.perf_counter(), 0.0
    async for _ in ask_greedily(client, messages, ANSWER_TOKENS):
        first = first or time.perf_counter() - started
    return first * 1e3


async def count_prompt(client: httpx.AsyncClient, messages: list[dict[str, Any]]) -> int:
    body = {"model": "model", "messages": messages, "max_tokens": 1}
    return int((await client.post("/v1/chat/completions", json=body)).json()["usage"]["prompt_tokens"])


async def measure(ask: Ask, files: Sequence[bytes], client: httpx.AsyncClient) -> None:
    first_token, rng = partial(time_first_token, client), random.Random(0)
    new, known, other = [], [], []
    for file in files:
        question = draw_words(rng, 12)
        new.append(await first_token(ask(file, question)))
        known.append(await first_token(ask(file, question)))
        other.append(await first_token(ask(file, draw_words(rng, 12))))
    num_tokens = await count_prompt(client, ask(files[0], "What happens?"))
    medians = (statistics.median(each[1:]) for each in (new, known, other))
    print(
        "first token, ms: {:.0f} never seen, {:.1f} known, {:.1f} known with another question".format(*medians), end=""
    )
    print(f" ({num_tokens} tokens)", flush=True)


async def ask_servers(arguments: argparse.Namespace, measure: Measure) -> None:
    """Measure each server, one after the other."""
    for name in SERVERS:
        if name == "vllm-serve" and arguments.vllm_python is None:
            continue
        server = ServerProcess(name, arguments.model, arguments.vllm_python)
        await server.start()
        print(f"{name}, ", end="", flush=True)
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
                await measure(client)
        finally:
            await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm-python")
    parser.add_argument("--films", type=int, default=5, help="beside one to warm up (default: 5)")
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--size", default="640x360")
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    films = [draw_film(seed, arguments.seconds, width, height) for seed in range(arguments.films + 1)]
    asyncio.run(ask_servers(arguments, partial(measure, ask_about, films)))


if __name__ == "__main__":
    main()
