"""Reads the current values of counters."""

from keepsight.frontend.media_pool import MediaPool
from keepsight.observe.catalogue import Slots
from keepsight.observe.counters import Counters


def counted(pool: MediaPool, *slots: Slots | int) -> list[float]:
    return read_counters(pool._counters, *slots)


def read_counters(counters: Counters, *slots: Slots | int) -> list[float]:
    """Return each counter's value, summed over modalities."""
    numbers = counters.numbers()
    return [numbers[each] if isinstance(each, int) else sum(numbers[slot] for slot in each.values()) for each in slots]
