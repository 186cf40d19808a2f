"""Requests and pictures to measure engines with: drawn from a seed, and passed to another interpreter in a folder.

Knows no engine, and imports only the package's drawing code, so that it also works in a peer's environment.
"""

import base64
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepsight.bench.draw import PICTURE_COUNT_WEIGHTS, choose_by_popularity, draw_words

# A user's message: texts, and pictures by their number, in order.
Request = list[str | int]


def mixed_requests(num_requests: int, num_pictures: int, exponent: float, seed: int) -> list[Request]:
    """Draw texts of 20 to 120 words with zero to three pictures, some before and some after the text."""
    rng = random.Random(seed)
    counts = rng.choices(list(PICTURE_COUNT_WEIGHTS), list(PICTURE_COUNT_WEIGHTS.values()), k=num_requests)
    requests: list[Request] = []
    for count in counts:
        request: Request = [*choose_by_popularity(rng, num_pictures, count, exponent)]
        request.insert(rng.randrange(count + 1), draw_words(rng, rng.randint(20, 120)))
        requests.append(request)
    return requests


@dataclass(frozen=True, slots=True)
class Workload:
    """The batches that an engine answers one after the other, greedily and in full length."""

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
    """Return the request in OpenAI's form, with the pictures as data URLs."""
    content: list[dict[str, Any]] = []
    for part in request:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            url = "data:image/jpeg;base64," + base64.b64encode(pictures[part]).decode()
            content.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": content}]
