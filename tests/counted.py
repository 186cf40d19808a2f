"""What a pool of media has counted by now."""

from keepsight.frontend.media_pool import MediaPool


def counted(pool: MediaPool, *slots: int) -> list[float]:
    numbers = pool._counters.numbers()
    return [numbers[slot] for slot in slots]
