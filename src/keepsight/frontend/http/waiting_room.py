"""How many requests may wait for an answer at once, and how many bytes their bodies may have together.

Whoever finds no room is told so at once: a client that tries elsewhere, or again, is better off than one in a line that
grows.  Used on one event loop, so it needs no lock.
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
        """For one more, if it is small."""
        return self.num_requests < self._max_requests and self.num_bytes < self._max_bytes

    @contextmanager
    def admit(self) -> Iterator[None]:
        if self.num_requests >= self._max_requests:
            raise ServerOverloadedError("the server has as many requests as it takes: try again")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    def take_bytes(self, num_bytes: int) -> None:
        """Of a body that is being read; whoever took them gives them back."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ServerOverloadedError("the server is reading as much as it takes: try again")
        self.num_bytes += num_bytes

    def try_reserve_bytes(self, num_bytes: int) -> bool:
        """Of a body that says how large it will be.  Half of the room is left to what has really come."""
        if self.num_bytes + num_bytes > self._max_bytes // 2:
            return False
        self.num_bytes += num_bytes
        return True

    def give_back_bytes(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def check_invariants(self) -> None:
        assert 0 <= self.num_requests <= self._max_requests
        assert 0 <= self.num_bytes <= self._max_bytes
