"""Simulates what a policy would have saved on a recorded or generated trace, and bounds what any policy could save.

Pure: names, sizes and costs only. Invariant: `offline_bound` is never less than what `simulate` gives.
"""

import heapq
import math
from collections.abc import Sequence

from keepsight.tiers.policies import POLICIES, Shadow
from keepsight.tiers.trace import Access

_NEVER = math.inf


def simulate(trace: Sequence[Access], policy_name: str, max_bytes: int) -> float:
    """Return the share of seconds saved, relative to the cost of everything without a cache."""
    shadow = Shadow(POLICIES[policy_name](max_bytes), max_bytes)
    for access in trace:
        shadow.see(access.key, access.num_bytes, access.seconds)
    return _share_of(trace, shadow.saved_seconds)


def simulate_belady(trace: Sequence[Access], max_bytes: int) -> float:
    """Return the share saved by evicting what is needed last, knowing the future: optimal if all sizes are equal."""
    next_use = _next_uses(trace)
    held: dict[str, float] = {}
    sizes: dict[str, int] = {}
    heap: list[tuple[float, str]] = []
    num_bytes, saved = 0, 0.0
    for access, when in zip(trace, next_use, strict=True):
        if access.key in held:
            saved += access.seconds
        else:
            sizes[access.key] = access.num_bytes
            num_bytes += access.num_bytes
        held[access.key] = when
        heapq.heappush(heap, (-when, access.key))
        # The new entry may itself be evicted: it is not kept then.
        while num_bytes > max_bytes:
            negated, key = heapq.heappop(heap)
            if held.get(key) == -negated:
                del held[key]
                num_bytes -= sizes.pop(key)
    return _share_of(trace, saved)


def offline_bound(trace: Sequence[Access], max_bytes: int) -> float:
    """Return an upper bound on the share that any policy can save, whatever the sizes and costs.

    To serve a use, its bytes must be held since the previous one. All uses together hold no more than the budget at
    every step, so at most budget x steps: that much is given to the uses that save most for it, the last one in part.
    """
    wishes = sorted(_wishes(trace, max_bytes), key=lambda wish: wish[0] / wish[1], reverse=True)
    left, saved = float(max_bytes) * len(trace), 0.0
    for seconds, byte_steps in wishes:
        part = min(1.0, left / byte_steps)
        saved += part * seconds
        left -= part * byte_steps
        if left <= 0:
            break
    return _share_of(trace, saved)


def distinct_bytes(trace: Sequence[Access]) -> int:
    """Return the bytes that it would take to hold everything."""
    return sum({access.key: access.num_bytes for access in trace}.values())


def _share_of(trace: Sequence[Access], saved_seconds: float) -> float:
    seconds = sum(access.seconds for access in trace)
    return saved_seconds / seconds if seconds else 0.0


def _wishes(trace: Sequence[Access], max_bytes: int) -> list[tuple[float, int]]:
    """Return, for each use that could be a hit, the seconds that this would save and the bytes x steps it takes."""
    last: dict[str, int] = {}
    wishes = []
    for step, access in enumerate(trace):
        if access.key in last and access.num_bytes <= max_bytes:
            wishes.append((access.seconds, max(1, access.num_bytes) * (step - last[access.key])))
        last[access.key] = step
    return wishes


def _next_uses(trace: Sequence[Access]) -> list[float]:
    coming: dict[str, int] = {}
    uses = [_NEVER] * len(trace)
    for step in range(len(trace) - 1, -1, -1):
        uses[step] = coming.get(trace[step].key, _NEVER)
        coming[trace[step].key] = step
    return uses
