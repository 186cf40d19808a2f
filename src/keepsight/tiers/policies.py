"""Eviction policies: they order keys, and never see the entries.

Pure: no clock, no threads, no randomness. The owner of the entries reports additions, uses and removals, and counts the
bytes; invariant: a policy knows exactly the keys that are held, and `evict` returns one of them.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    def __contains__(self, key: str) -> bool: ...

    def __len__(self) -> int: ...

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        """Note that the key is held from now on; its entry took `seconds` to compute."""

    def use(self, key: str) -> None: ...

    def remove(self, key: str) -> None:
        """Note that the key was removed, other than by eviction."""

    def evict(self) -> str:
        """Choose the key to evict and forget it. At least one key must be held."""


class Lru:
    """Evicts the least recently used entry first."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        self._order[key] = None

    def use(self, key: str) -> None:
        self._order.move_to_end(key)

    def remove(self, key: str) -> None:
        del self._order[key]

    def evict(self) -> str:
        return self._order.popitem(last=False)[0]


@dataclass(slots=True)
class _Weighed:
    seconds_per_byte: float
    num_uses: int = 1
    # Identifies its valid heap item; others are outdated.
    turn: int = 0


class Cost:
    """Evicts first what saves least per byte (greedy dual size frequency): seconds x uses / bytes, with aging."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._entries: dict[str, _Weighed] = {}
        # (worth, turn, key): least worth first; among equals, least recently used. Outdated items are removed lazily.
        self._heap: list[tuple[float, int, str]] = []
        # The worth of the last evicted entry: new entries must not lose against those used often long ago.
        self._age = 0.0
        self._turn = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        self._entries[key] = _Weighed(seconds / max(1, num_bytes))
        self._place(key)

    def use(self, key: str) -> None:
        self._entries[key].num_uses += 1
        self._place(key)

    def remove(self, key: str) -> None:
        del self._entries[key]

    def evict(self) -> str:
        while True:
            worth, turn, key = heapq.heappop(self._heap)
            if self._is_true(key, turn):
                del self._entries[key]
                self._age = worth
                return key

    def _place(self, key: str) -> None:
        self._turn += 1
        entry = self._entries[key]
        entry.turn = self._turn
        heapq.heappush(self._heap, (self._age + entry.num_uses * entry.seconds_per_byte, self._turn, key))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [place for place in self._heap if self._is_true(place[2], place[1])]
            heapq.heapify(self._heap)

    def _is_true(self, key: str, turn: int) -> bool:
        return key in self._entries and self._entries[key].turn == turn


@dataclass(slots=True)
class _Queued:
    num_bytes: int
    num_uses: int = 0


class S3Fifo:
    """New entries pass through a small queue, and only those used there stay: entries used only once go soon."""

    def __init__(self, max_bytes: int) -> None:
        self._max_small_bytes = max_bytes // 10
        self._max_ghost_bytes = max_bytes - self._max_small_bytes
        self._small: OrderedDict[str, _Queued] = OrderedDict()
        self._main: OrderedDict[str, _Queued] = OrderedDict()
        # Keys and sizes of entries evicted from the small queue: one that comes back was evicted too early.
        self._ghosts: OrderedDict[str, int] = OrderedDict()
        self._num_small_bytes = self._num_ghost_bytes = 0

    def __contains__(self, key: str) -> bool:
        return key in self._small or key in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        if key in self._ghosts:
            self._num_ghost_bytes -= self._ghosts.pop(key)
            self._main[key] = _Queued(num_bytes)
        else:
            self._small[key] = _Queued(num_bytes)
            self._num_small_bytes += num_bytes

    def use(self, key: str) -> None:
        entry = self._small.get(key) or self._main[key]
        entry.num_uses = min(entry.num_uses + 1, 3)

    def remove(self, key: str) -> None:
        if key in self._small:
            self._num_small_bytes -= self._small.pop(key).num_bytes
        else:
            del self._main[key]

    def evict(self) -> str:
        while True:
            is_small = self._num_small_bytes > self._max_small_bytes or not self._main
            key = self._judge_small() if is_small else self._judge_main()
            if key is not None:
                return key

    def _judge_small(self) -> str | None:
        key, entry = self._small.popitem(last=False)
        self._num_small_bytes -= entry.num_bytes
        if entry.num_uses > 1:
            self._main[key] = _Queued(entry.num_bytes)
            return None
        self._remember(key, entry.num_bytes)
        return key

    def _judge_main(self) -> str | None:
        key, entry = self._main.popitem(last=False)
        if entry.num_uses == 0:
            return key
        entry.num_uses -= 1
        self._main[key] = entry
        return None

    def _remember(self, key: str, num_bytes: int) -> None:
        self._ghosts[key] = num_bytes
        self._num_ghost_bytes += num_bytes
        while self._num_ghost_bytes > self._max_ghost_bytes:
            self._num_ghost_bytes -= self._ghosts.popitem(last=False)[1]


class Shadow:
    """Simulates what a policy alone would hold after the same uses, and the time it would have saved."""

    def __init__(self, policy: Policy, max_bytes: int) -> None:
        self.policy = policy
        self.saved_seconds = 0.0
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0

    def see(self, key: str, num_bytes: int, seconds: float, fading: float = 1.0) -> list[str]:
        """Simulate a use. Return the keys evicted for it: its own, if its entry alone exceeds the budget.

        `fading`: how much of the time saved so far still counts.
        """
        self.saved_seconds *= fading
        if key in self.policy:
            self.saved_seconds += seconds
            self.policy.use(key)
            return []
        if num_bytes > self._max_bytes:
            return [key]
        self._num_bytes += num_bytes
        evicted = []
        while self._num_bytes > self._max_bytes and len(self.policy):
            evicted.append(self.evict())
        self._sizes[key] = num_bytes
        self.policy.add(key, num_bytes, seconds)
        return evicted

    def evict(self) -> str:
        key = self.policy.evict()
        self._num_bytes -= self._sizes.pop(key)
        return key

    def remove(self, key: str) -> None:
        if key in self.policy:
            self.policy.remove(key)
            self._num_bytes -= self._sizes.pop(key)


class Auto:
    """LRU or S3-FIFO, whichever would have saved more lately; the entries held approach those it would hold."""

    # The other policy must save more by this factor to be followed instead.
    _MARGIN = 1.02
    # Number of recent uses that count, as a multiple of the entries held.
    _MEMORY = 10

    def __init__(self, max_bytes: int) -> None:
        self._shadows = (Shadow(Lru(), max_bytes), Shadow(S3Fifo(max_bytes), max_bytes))
        self._followed = self._shadows[0]
        self._held: dict[str, tuple[int, float]] = {}
        # Entries held that the followed policy would have evicted.
        self._surplus: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        self._held[key] = (num_bytes, seconds)
        self.use(key)

    def use(self, key: str) -> None:
        num_bytes, seconds = self._held[key]
        fading = 1 - 1 / max(1000, self._MEMORY * len(self._held))
        for shadow in self._shadows:
            evicted = shadow.see(key, num_bytes, seconds, fading)
            if shadow is self._followed:
                self._surplus.pop(key, None)
                self._surplus.update((each, None) for each in evicted if each in self._held)
        self._follow_the_better()

    def remove(self, key: str) -> None:
        del self._held[key]
        self._surplus.pop(key, None)
        for shadow in self._shadows:
            shadow.remove(key)

    def evict(self) -> str:
        key = self._surplus.popitem(last=False)[0] if self._surplus else self._followed.evict()
        while key not in self._held:
            key = self._followed.evict()
        del self._held[key]
        return key

    def _follow_the_better(self) -> None:
        better = max(self._shadows, key=lambda shadow: shadow.saved_seconds)
        if better.saved_seconds > self._MARGIN * self._followed.saved_seconds:
            self._followed = better
            self._surplus = OrderedDict((key, None) for key in self._held if key not in better.policy)


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "s3fifo": S3Fifo, "cost": Cost, "auto": Auto}
