"""Time to the first token of a known picture, compared in turn to that of a known text with as many tokens.

    PYTHONPATH=. python benchmarks/known_against_text.py --model FOLDER [--requests 60]

A real `keepsight serve` with its defaults, one request at a time.  The picture is sent again, or only its uuid.  The
same new words follow the picture, and a text that makes the prompt exactly as many tokens long.  Printed are medians,
and the medians of the ratios between requests with the same words.
"""

import argparse
import asyncio
import statistics
from collections import deque
from pathlib import Path

from benchmarks.servers import ServerProcess
from keepsight.bench.address import Address
from keepsight.bench.ask import Answer, Server, ask
from keepsight.bench.workloads import Drawer, Part, WorkloadOptions

MAX_TRIES = 200


# The kinds of requests, sent in turn; the others are compared to the last.
SENT, NAMED, TEXT = "picture sent again", "its uuid alone", "text"
NAME = b'{"type":"image_url","image_url":null,"uuid":"seen before"}'


class Contest:
    def __init__(self, url: str, seed: int, words_per_picture: int) -> None:
        self._server = Server(Address.parse(f"{url}/v1"), "model", None, {"temperature": 0, "max_tokens": 1})
        self._draw = Drawer("known-against-text", WorkloadOptions(seed, words_per_picture=words_per_picture))

    async def run(self, num_requests: int) -> dict[str, list[Answer]]:
        picture = self._draw.picture()
        await self._ask(picture[:-1] + b',"uuid":"seen before"}')
        await self._ask(NAME)
        parts = {SENT: picture, NAMED: NAME, TEXT: await self._find_text_as_long(picture)}
        answers: dict[str, list[Answer]] = {name: [] for name in parts}
        names = deque(parts)
        for _ in range(num_requests):
            words = self._draw.words()
            for name in names:
                answers[name].append(await self._ask(parts[name], words))
            names.rotate()  # being first is a disadvantage
        return answers

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


async def measure(arguments: argparse.Namespace) -> dict[str, list[Answer]]:
    process = ServerProcess("keepsight-serve", arguments.model, None)
    try:
        await process.start()
        return await Contest(process.url, arguments.seed, arguments.words).run(arguments.requests)
    finally:
        await process.stop()


def format_line(name: str, answers: list[Answer], text_answers: list[Answer]) -> str:
    milliseconds = statistics.median(each.token_times[0] * 1000 for each in answers)
    computed = statistics.median(each.num_prompt_tokens - (each.num_cached_tokens or 0) for each in answers)
    length = statistics.median(each.num_prompt_tokens for each in answers)
    pairs = zip(answers, text_answers, strict=True)
    ratio = statistics.median(each.token_times[0] / text.token_times[0] for each, text in pairs)
    return (
        f"{name:20} first token {milliseconds:5.1f} ms, {ratio:.3f} of the text's;"
        f" {length:.0f} tokens of prompt, {computed:.0f} computed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--words", type=int, default=256, help="about as many as a picture has tokens")
    parser.add_argument("--seed", type=int, default=0)
    answers = asyncio.run(measure(parser.parse_args()))
    for name, given in answers.items():
        print(format_line(name, given, answers[TEXT]))


if __name__ == "__main__":
    main()
