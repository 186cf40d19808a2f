"""Words, pictures and their popularity, drawn from a seed.

Knows no server and no engine, so that other engines, in any environment, can be measured with the same inputs.
"""

import bisect
import io
import itertools
import random

import numpy as np
from PIL import Image

TEXT = (
    "the value of an object is what a name refers to when it is called with no argument and returns a list or string "
    "that can be changed in place if its class defines such a method otherwise the statement raises an exception while "
    "other modules import their functions from here before the first line of code after that block has been executed"
)
WORDS = TEXT.split()
# The shares of requests with 0, 1, 2 and 3 pictures in real traffic: 1.5 pictures per request that has any.
PICTURE_COUNT_WEIGHTS = {0: 0.25, 1: 0.48, 2: 0.16, 3: 0.11}


def photograph(seed: int, width: int = 1024, height: int | None = None) -> bytes:
    """Return a synthetic photograph as a JPEG."""
    buffer = io.BytesIO()
    draw_photograph(seed, width, width if height is None else height).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def draw_photograph(seed: int, width: int, height: int) -> Image.Image:
    """Draw smooth shapes under fine noise, which compress about as well as photographs."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(height // 16, 1), max(width // 16, 1), 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    noise = rng.integers(-8, 9, smooth.shape, dtype=np.int16)
    return Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8))


def draw_words(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def choose_by_popularity(rng: random.Random, num_items: int, count: int, exponent: float) -> list[int]:
    """Choose `count` distinct items; the k-th has a weight of 1 / k ** exponent (Zipf)."""
    weights = list(itertools.accumulate((k + 1) ** -exponent for k in range(num_items)))
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        chosen[bisect.bisect(weights, rng.random() * weights[-1])] = None
    return list(chosen)
