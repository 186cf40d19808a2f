"""Limits how many requests may wait for an answer at once, and how many bytes their bodies may have together.

A request that finds no room is refused at once: a client that tries elsewhere, or again, is better off than one in a
growing queue. It waits from when its body is complete: before that only its bytes count, or a few clients that send
slowly would keep others out. Used on one event loop, so it needs no lock.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from keepsight.errors import ServerOverloadedError


class WaitingRoom:
    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self.num_requests = 0
        self.num_bytes = 0

    @property
    def has_room(self) -> bool:
        """True if there is room for one more small request."""
        return self.num_requests < self._max_requests and self.num_bytes < self._max_bytes

    def refuse_if_full(self) -> None:
        if self.num_requests >= self._max_requests:
            raise ServerOverloadedError("the server has reached its limit of requests: try again")

    @contextmanager
    def admit(self) -> Iterator[None]:
        self.refuse_if_full()
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def take_bytes(self, num_bytes: int) -> None:
        """Take room for a body that is being read; the caller has to give it back."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ServerOverloadedError("the server is reading as many bytes as it can: try again")
        self.num_bytes += num_bytes

    def try_reserve_bytes(self, num_bytes: int) -> bool:
        """Take room for a body by its stated length, or return False. Half of the room is left to arrived data."""
        if self.num_bytes + num_bytes > self._max_bytes // 2:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back_bytes(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def check_invariants(self) -> None:
        assert 0 <= self.num_requests <= self._max_requests
        assert 0 <= self.num_bytes <= self._max_bytes
