"""The eviction order of idle entries: least recently released first, pinned entries after all others.

Pins are best effort: a pin ends at its time or when its entry goes, and pinned entries are evicted, too, once nothing
else is left. The caller supplies the time. Knows nothing of what the keys name. Invariant: the size of what is
pinned never exceeds its part of the cache.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from keepsight.lru_cache import PINNABLE_PART

K = TypeVar("K")

# Expired pins are looked for at most this often, so a pin may last that much longer.
SECONDS_BETWEEN_LOOKS = 60.0


class _Pin(NamedTuple):
    until: float
    size: int


class EvictionOrder(Generic[K]):
    def __init__(self, max_size: int) -> None:
        """Initialize; `max_size` is that of the whole cache, in the unit of pin sizes."""
        self.size_of_pinned = 0
        self._max_size_of_pinned = int(max_size * PINNABLE_PART)
        # Both least recently released first.
        self._ordinary: OrderedDict[K, None] = OrderedDict()
        self._pinned: OrderedDict[K, None] = OrderedDict()
        # The pins of all entries, idle or in use.
        self._pins: dict[K, _Pin] = {}
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._pinned)

    def __contains__(self, key: K) -> bool:
        return key in self._ordinary or key in self._pinned

    def __iter__(self) -> Iterator[K]:
        """Iterate over the idle keys in eviction order."""
        yield from self._ordinary
        yield from self._pinned

    def add(self, key: K) -> None:
        """Add a key that became idle just now."""
        self._queue_of(key)[key] = None

    def remove(self, key: K) -> None:
        """Remove a key that is used again; it stays pinned if it is."""
        del self._queue_of(key)[key]

    def first(self) -> K:
        return next(iter(self))

    def forget(self, key: K) -> None:
        """Drop a key and its pin, if it has one."""
        self._queue_of(key).pop(key, None)
        if (pin := self._pins.pop(key, None)) is not None:
            self.size_of_pinned -= pin.size

    def clear(self) -> None:
        self._ordinary.clear()
        self._pinned.clear()
        self._pins.clear()
        self.size_of_pinned = 0

    def pin(self, key: K, until: float, size: int) -> bool:
        """Pin a held key, idle or in use, at least until then. Return False if too much is pinned already.

        If keys are pinned from the front of a row, the last of them is evicted first.
        """
        pin = self._pins.get(key)
        if pin is None:
            if self.size_of_pinned + size > self._max_size_of_pinned:
                return False
            self.size_of_pinned += size
            if key in self._ordinary:
                del self._ordinary[key]
                self._pinned[key] = None
                self._pinned.move_to_end(key, last=False)
        self._pins[key] = _Pin(until if pin is None else max(until, pin.until), size)
        return True

    def pinned_until(self, key: K) -> float | None:
        return self._pins[key].until if key in self._pins else None

    def end_pins(self, now: float) -> None:
        """End expired pins; their keys are treated as if released just now."""
        if not self._pins or now < self._next_look:
            return
        self._next_look = now + SECONDS_BETWEEN_LOOKS
        ended = [key for key, pin in self._pins.items() if pin.until <= now]
        for key in reversed(ended):
            self.size_of_pinned -= self._pins.pop(key).size
            if key in self._pinned:
                del self._pinned[key]
                self._ordinary[key] = None

    def _queue_of(self, key: K) -> OrderedDict[K, None]:
        return self._pinned if key in self._pins else self._ordinary

    def check_invariants(self) -> None:
        assert self._pinned.keys() <= self._pins.keys()
        assert self._ordinary.keys().isdisjoint(self._pins)
        assert self.size_of_pinned == sum(pin.size for pin in self._pins.values()) <= self._max_size_of_pinned
