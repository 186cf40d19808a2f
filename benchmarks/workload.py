"""Requests and pictures to measure engines with: made from a seed, and carried to another interpreter in a folder.

Knows no engine and imports nothing of the package, so that the environment of a peer can read it too.
"""

import base64
import bisect
import io
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# What a user says: texts, and pictures by their number, in the order of the message.
Request = list[str | int]
# As many requests with 0, 1, 2 and 3 pictures as real traffic has: 1.5 for each that has any.
PICTURE_COUNT_WEIGHTS = {0: 0.25, 1: 0.48, 2: 0.16, 3: 0.11}
TEXT = (
    "the value of an object is what a name refers to when it is called with no argument and returns a list or string "
    "that can be changed in place if its class defines such a method otherwise the statement raises an exception while "
    "other modules import their functions from here before the first line of code after that block has been executed"
)
WORDS = TEXT.split()


def photograph(seed: int, side: int = 1024) -> bytes:
    """A JPEG of smooth shapes under fine noise, which compresses about as photographs do."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))
    noise = rng.integers(-8, 9, smooth.shape)
    buffer = io.BytesIO()
    Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def say(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def choose_by_popularity(rng: random.Random, num_items: int, count: int, exponent: float) -> list[int]:
    """Different items; the k-th is asked for as often as 1 / k ** exponent (Zipf)."""
    weights = list(itertools.accumulate((k + 1) ** -exponent for k in range(num_items)))
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen[bisect.bisect(weights, rng.random() * weights[-1])] = None
    return list(chosen)


def mixed_requests(num_requests: int, num_pictures: int, exponent: float, seed: int) -> list[Request]:
    """Texts of 20 to 120 words with no to three pictures, some before and some after their text."""
    rng = random.Random(seed)
    counts = rng.choices(list(PICTURE_COUNT_WEIGHTS), list(PICTURE_COUNT_WEIGHTS.values()), k=num_requests)
    requests: list[Request] = []
    for count in counts:
        request: Request = [*choose_by_popularity(rng, num_pictures, count, exponent)]
        request.insert(rng.randrange(count + 1), say(rng, rng.randint(20, 120)))
        requests.append(request)
    return requests


@dataclass(frozen=True, slots=True)
class Workload:
    """What one engine is to answer, greedily and in full length: batch after batch."""

    batches: list[list[Request]]
    pictures: list[bytes]
    max_tokens: int

    def save(self, folder: Path) -> None:
        for number, picture in enumerate(self.pictures):
            (folder / f"{number}.jpg").write_bytes(picture)
        facts = {"batches": self.batches, "num_pictures": len(self.pictures), "max_tokens": self.max_tokens}
        (folder / "workload.json").write_text(json.dumps(facts))

    @classmethod
    def load(cls, folder: Path) -> "Workload":
        facts = json.loads((folder / "workload.json").read_text())
        pictures = [(folder / f"{number}.jpg").read_bytes() for number in range(facts["num_pictures"])]
        return cls(facts["batches"], pictures, facts["max_tokens"])


def to_messages(request: Request, pictures: Sequence[bytes]) -> list[dict[str, Any]]:
    """OpenAI's form, with the pictures as data URLs."""
    content: list[dict[str, Any]] = []
    for part in request:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            url = "data:image/jpeg;base64," + base64.b64encode(pictures[part]).decode()
            content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": content}]
