"""The rules by which a request is given to one of several servers that hold different things: engines, or replicas.

Pure. Whatever a server holds, it is skipped while it is far busier than the others: what everybody asks about should
come to be held by other servers too.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar


class Merit(NamedTuple):
    """What speaks for a server, the weightiest first."""

    held_media: int
    # Of the request's `prompt_cache_key`; empty if it has none.
    affinity: bytes
    # Less what it knows of the prompt's beginning.
    work_ahead: int

    @property
    def order(self) -> tuple[int, bytes, int]:
        return self.held_media, self.affinity, -self.work_ahead


Server = TypeVar("Server")


def choose_by_merit(
    work_in_flight: Mapping[Server, int],
    slack: int,
    merit_of: Callable[[Server], Merit],
    break_tie: Callable[[Server], bytes],
) -> Server:
    """Choose the best server, except those with more in flight than twice the least busy one and `slack` beyond."""
    limit = 2 * min(work_in_flight.values()) + slack
    orders = {server: merit_of(server).order for server, work in work_in_flight.items() if work <= limit}
    most = max(orders.values())
    best = [server for server, order in orders.items() if order == most]
    # Always choosing the first would leave the others' caches empty where requests do not overlap.
    return best[0] if len(best) == 1 else max(best, key=break_tie)


def rendezvous(*names: object) -> bytes:
    """Hash names, the last a server's: the same everywhere, without state; if one is missing, only its names move."""
    return hashlib.sha256(repr(names).encode()).digest()
