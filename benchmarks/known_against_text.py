"""A picture seen before against the same number of text tokens seen before: time to first token, in turn.

    PYTHONPATH=. python benchmarks/known_against_text.py --model FOLDER [--requests 60]

A real `keepsight serve` with its defaults, one request at a time.  Behind the picture, and behind a text that makes the
prompt as long to the token, stand the same new words.  What is given are medians, and the median of the pairs' ratios.
"""

import argparse
import asyncio
import statistics
from pathlib import Path

from benchmarks.servers import ServerProcess
from keepsight.bench.address import Address
from keepsight.bench.ask import Answer, Server, ask
from keepsight.bench.workloads import Drawer, Part, WorkloadOptions

MAX_TRIES = 200


class Contest:
    def __init__(self, url: str, seed: int, words_per_picture: int) -> None:
        self._server = Server(Address.parse(f"{url}/v1"), "model", None, {"temperature": 0, "max_tokens": 1})
        self._draw = Drawer("known-against-text", WorkloadOptions(seed, words_per_picture=words_per_picture))

    async def run(self, num_requests: int) -> list[tuple[Answer, Answer]]:
        """About the picture, about the text."""
        picture = self._draw.picture()
        text = await self._find_text_as_long(picture)
        pairs = []
        for number in range(num_requests):
            words, is_picture_first = self._draw.words(), number % 2 == 0
            parts = (picture, text) if is_picture_first else (text, picture)
            first, second = [await self._ask(part, words) for part in parts]
            pairs.append((first, second) if is_picture_first else (second, first))
        return pairs

    async def _find_text_as_long(self, picture: Part) -> Part:
        words = self._draw.words()
        wanted = (await self._ask(picture, words)).num_prompt_tokens
        num_words = self._draw.options.words_per_picture
        for _ in range(MAX_TRIES):
            text = self._draw.words(num_words)
            found = (await self._ask(text, words)).num_prompt_tokens
            if found == wanted:
                return text
            num_words = max(1, num_words + round((wanted - found) / 2))
        raise SystemExit(f"no text of {wanted} tokens was found")

    async def _ask(self, *parts: Part) -> Answer:
        message = b'{"role":"user","content":[%s]}' % b",".join(parts)
        answer = await ask(self._server, [message])
        if answer.error:
            raise SystemExit(answer.error)
        return answer


async def measure(arguments: argparse.Namespace) -> list[tuple[Answer, Answer]]:
    process = ServerProcess("keepsight-serve", arguments.model, None)
    try:
        await process.start()
        return await Contest(process.url, arguments.seed, arguments.words).run(arguments.requests)
    finally:
        await process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--words", type=int, default=256, help="about as many as a picture has tokens")
    parser.add_argument("--seed", type=int, default=0)
    pairs = asyncio.run(measure(parser.parse_args()))
    for name, answers in zip(("picture", "text"), zip(*pairs, strict=True), strict=True):
        milliseconds = statistics.median(each.token_times[0] * 1000 for each in answers)
        computed = statistics.median(each.num_prompt_tokens - (each.num_cached_tokens or 0) for each in answers)
        length = statistics.median(each.num_prompt_tokens for each in answers)
        print(f"{name:8} first token {milliseconds:6.1f} ms, {length:.0f} tokens of prompt, {computed:.0f} computed")
    ratio = statistics.median(picture.token_times[0] / text.token_times[0] for picture, text in pairs)
    print(f"picture / text {ratio:.3f}, median of {len(pairs)} pairs")


if __name__ == "__main__":
    main()
