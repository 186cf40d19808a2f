"""Times several ways to do one thing in turn, so that a busy machine disturbs none more than the others."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def time_in_turn(
    ways: Mapping[str, Callable[[T], object]],
    given: Sequence[T],
    num_warm_up: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return each way's seconds for each given input, without the warm-up.  Which way goes first alternates."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number, each in enumerate(given):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            began = clock()
            ways[name](each)
            taken[name].append(clock() - began)
    return {name: seconds[num_warm_up:] for name, seconds in taken.items()}
