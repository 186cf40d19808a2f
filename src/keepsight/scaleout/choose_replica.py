"""Chooses which of several replicas gets a request, by the rules by which a frontend chooses an engine.

Pure: no connections, no clock. What a replica holds is estimated from what was sent there; a wrong estimate only costs
duplicate work. Invariant: a replica's work in flight is that of the requests noted as sent and not yet as ended.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from typing import Literal, TypeVar

from keepsight.choose_by_merit import Merit, choose_by_merit, rendezvous
from keepsight.scaleout.affinity import SHORTEST_BEGINNING, Affinity

# As `choose_engine.SLACK_TOKENS`, of about 4 bytes each.
SLACK_BYTES = 4 * 8192
# Per replica, of pictures and of beginnings.
MAX_NAMES = 2**16
ChosenBy = Literal["owner", "media", "cache_key", "beginning", "load"]


class _KnownNames:
    """Names of what a server has, or soon will: they are in flight, or were taken by it."""

    def __init__(self) -> None:
        self._in_flight = Counter[bytes]()
        # The least recently used first.
        self._taken = OrderedDict[bytes, None]()

    def __contains__(self, name: bytes) -> bool:
        return name in self._in_flight or name in self._taken

    def note_sent(self, names: Iterable[bytes]) -> None:
        for name in names:  # `update` would count with a mapping's values
            self._in_flight[name] += 1

    def note_taken(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._taken[name] = None
            self._taken.move_to_end(name)
        while len(self._taken) > MAX_NAMES:
            self._taken.popitem(last=False)

    def note_ended(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._in_flight[name] -= 1
            if not self._in_flight[name]:
                del self._in_flight[name]

    def forget_taken(self) -> None:
        self._taken.clear()

    def check_invariants(self, *, is_idle: bool) -> None:
        assert all(count > 0 for count in self._in_flight.values())
        assert not (is_idle and self._in_flight)
        assert len(self._taken) <= MAX_NAMES


class ReplicaView:
    """What is known of one replica."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_bytes_in_flight = self.num_requests = 0
        self._media, self._beginnings = _KnownNames(), _KnownNames()

    def note_sent(self, affinity: Affinity) -> None:
        self.num_requests += 1
        self.num_bytes_in_flight += affinity.num_bytes
        self._media.note_sent(affinity.media)
        self._beginnings.note_sent(affinity.beginnings)

    def note_taken(self, affinity: Affinity) -> None:
        """Called if the replica does not refuse a request that was sent. (Anybody may send some that it refuses.)"""
        self._media.note_taken(affinity.media)
        self._beginnings.note_taken(affinity.beginnings)

    def note_ended(self, affinity: Affinity) -> None:
        self.num_requests -= 1
        self.num_bytes_in_flight -= affinity.num_bytes
        self._media.note_ended(affinity.media)
        self._beginnings.note_ended(affinity.beginnings)

    def forget(self) -> None:
        """Called when the replica's caches are empty."""
        self._media.forget_taken()
        self._beginnings.forget_taken()

    def count_held_media_bytes(self, affinity: Affinity) -> int:
        return sum(num_bytes for name, num_bytes in affinity.media.items() if name in self._media)

    def count_known_beginning(self, affinity: Affinity) -> int:
        """Return the length of the longest beginning that was sent to this replica."""
        names = enumerate(affinity.beginnings)
        return max((SHORTEST_BEGINNING << index for index, name in names if name in self._beginnings), default=0)

    def check_invariants(self) -> None:
        assert self.num_requests >= 0
        assert self.num_bytes_in_flight >= 0
        assert self.num_requests or not self.num_bytes_in_flight
        for names in (self._media, self._beginnings):
            names.check_invariants(is_idle=not self.num_requests)


View = TypeVar("View", bound=ReplicaView)


def choose_replica(affinity: Affinity, replicas: Collection[View]) -> tuple[View, ChosenBy]:
    """Choose by media, then by `cache_key`, then by load, which a known beginning offsets; and say by which."""

    def merit_of(replica: View) -> Merit:
        work_ahead = replica.num_bytes_in_flight - replica.count_known_beginning(affinity)
        of_cache_key = rendezvous(affinity.cache_key, replica.address) if affinity.cache_key else b""
        return Merit(replica.count_held_media_bytes(affinity), of_cache_key, -work_ahead)

    def break_tie(replica: View) -> bytes:
        return rendezvous(next(iter((*affinity.media, *affinity.beginnings)), b""), replica.address)

    work_in_flight = {replica: replica.num_bytes_in_flight for replica in replicas}
    chosen = choose_by_merit(work_in_flight, SLACK_BYTES, merit_of, break_tie)
    return chosen, _name_reason(merit_of(chosen), chosen.count_known_beginning(affinity))


def _name_reason(merit: Merit, known_beginning: int) -> ChosenBy:
    if merit.held_media:
        return "media"
    if merit.of_cache_key:
        return "cache_key"
    return "beginning" if known_beginning else "load"
