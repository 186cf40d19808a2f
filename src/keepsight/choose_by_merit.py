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
    # The rendezvous of the request's `prompt_cache_key`; empty if it has none.
    of_cache_key: bytes
    # Minus the work ahead of it, but for what it knows of the prompt's beginning.
    minus_work_ahead: int


Server = TypeVar("Server")


def choose_by_merit(
    work_in_flight: Mapping[Server, int],
    slack: int,
    merit_of: Callable[[Server], Merit],
    break_tie: Callable[[Server], bytes],
) -> Server:
    """Choose the best server, except those with more in flight than twice the least busy one and `slack` beyond."""
    limit = 2 * min(work_in_flight.values()) + slack
    merits = {server: merit_of(server) for server, work in work_in_flight.items() if work <= limit}
    most = max(merits.values())
    best = [server for server, merit in merits.items() if merit == most]
    # Always choosing the first would leave the others' caches empty where requests do not overlap.
    return best[0] if len(best) == 1 else max(best, key=break_tie)


def rendezvous(*names: object) -> bytes:
    """Hash names, the last a server's: the same everywhere, without state; if one is missing, only its names move."""
    return hashlib.sha256(repr(names).encode()).digest()
