"""Traces of cache accesses like those of real servers, drawn from a seed: names, sizes and costs only."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from keepsight.tiers.trace import Access

NUM_BYTES = 2_752_512  # embeddings of one picture, 27b
SECONDS = 0.011


def access(step: int, name: str, scale: float = 1.0) -> Access:
    return Access(float(step), name, int(NUM_BYTES * scale), SECONDS * scale)


def zipf_names(rng: np.random.Generator, num_names: int, skew: float, prefix: str = "z") -> Iterator[str]:
    weights = 1 / np.arange(1, num_names + 1) ** skew
    cumulative = np.cumsum(weights / weights.sum())
    while True:
        for rank in np.searchsorted(cumulative, rng.random(4096)):
            yield f"{prefix}{rank}"


def zipf(num_accesses: int, seed: int = 0) -> list[Access]:
    """Popular pictures; 30 % of all accesses are to pictures that come only once."""
    rng = np.random.default_rng(seed)
    names = zipf_names(rng, 20_000, 0.9)
    return [access(step, f"once{step}" if rng.random() < 0.3 else next(names)) for step in range(num_accesses)]


def scans(num_accesses: int, seed: int = 0) -> list[Access]:
    """Popular pictures, and now and then a batch job that reads a large set once from end to end."""
    rng = np.random.default_rng(seed)
    names = zipf_names(rng, 5000, 0.9)
    return [
        access(step, f"scan{step % 8000 + (step // 10_000 % 3) * 8000}" if step % 10_000 < 4000 else next(names))
        for step in range(num_accesses)
    ]


def shifting(num_accesses: int, seed: int = 0) -> list[Access]:
    """Popular pictures, which change all the time."""
    rng = np.random.default_rng(seed)
    period = 6000
    by_epoch = [zipf_names(rng, 3000, 1.0, f"e{epoch}-") for epoch in range(num_accesses // period + 2)]
    return [
        access(step, next(by_epoch[step // period + int(rng.random() < step % period / period)]))
        for step in range(num_accesses)
    ]


def sessions(num_accesses: int, seed: int = 0) -> list[Access]:
    """Chats that resend all their pictures on every turn: 300 at a time."""
    rng = np.random.default_rng(seed)
    live: list[tuple[int, int]] = []
    trace: list[Access] = []
    num_begun = 0
    while len(trace) < num_accesses:
        while len(live) < 300:
            live.append((num_begun, 1))
            num_begun += 1
        place = int(rng.integers(len(live)))
        chat, turn = live[place]
        trace += [access(len(trace), f"chat{chat}-{picture}") for picture in range(turn)]
        if rng.random() < 0.15:
            live.pop(place)
        else:
            live[place] = (chat, turn + int(rng.random() < 0.5))
    return trace[:num_accesses]


def loops(num_accesses: int, seed: int = 0) -> list[Access]:
    """A set of tests that is run again and again, beside popular pictures."""
    rng = np.random.default_rng(seed)
    names = zipf_names(rng, 5000, 1.0)
    return [access(step, f"loop{step % 3000}" if rng.random() < 0.7 else next(names)) for step in range(num_accesses)]


def mixed(num_accesses: int, seed: int = 0) -> list[Access]:
    """Small and large, cheap and expensive items: pictures, crops, clips."""
    rng = np.random.default_rng(seed)
    kinds = [(1.0, 1.0), (0.25, 0.6), (8.0, 20.0), (4.0, 2.0)]
    trace = []
    for step, name in enumerate(islice(zipf_names(rng, 12_000, 0.9), num_accesses)):
        size, cost = kinds[int(name[1:]) % len(kinds)]
        trace.append(Access(float(step), name, int(NUM_BYTES * size), SECONDS * cost))
    return trace


TRACES: dict[str, Callable[[int], list[Access]]] = {
    "zipf": zipf,
    "scans": scans,
    "shifting": shifting,
    "sessions": sessions,
    "loops": loops,
    "mixed": mixed,
}
