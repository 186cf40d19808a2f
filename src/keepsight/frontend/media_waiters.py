"""The requests that wait for pixels, indexed by media hash and by request: leaving touches only a request's own hashes.

Knows nothing of how pixels are made. Invariant: a request is listed under a hash exactly while that hash is listed
under the request. A hash stays until it is taken, even if no request waits for it any more. Ctrl-C may end a call
between two steps: each is then found, or found missing, by later calls without failing.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class MediaWaiters(Generic[T]):
    def __init__(self) -> None:
        # By media hash, then by request id.
        self._waiters: dict[str, dict[str, T]] = {}
        # By request id.
        self._hashes: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiters)

    def has_any(self, media_hash: str) -> bool:
        return bool(self._waiters.get(media_hash))

    def add(self, media_hash: str, request_id: str, waiter: T) -> None:
        self._hashes.setdefault(request_id, set()).add(media_hash)
        self._waiters.setdefault(media_hash, {})[request_id] = waiter

    def leave(self, request_id: str) -> list[str]:
        """Remove a request. Return those of its hashes that no request waits for any more."""
        left = self._hashes.pop(request_id, set())
        for media_hash in left:
            self._waiters.setdefault(media_hash, {}).pop(request_id, None)
        return [media_hash for media_hash in left if not self._waiters[media_hash]]

    def take(self, media_hash: str) -> dict[str, T]:
        """Remove a hash. Return its waiters by request id."""
        taken = self._waiters.pop(media_hash, {})
        for request_id in taken:
            hashes = self._hashes.get(request_id, set())
            hashes.discard(media_hash)
            if not hashes:
                self._hashes.pop(request_id, None)
        return taken

    def clear(self) -> None:
        self._waiters.clear()
        self._hashes.clear()

    def check_invariants(self) -> None:
        by_hash = {(each, request_id) for each, waiters in self._waiters.items() for request_id in waiters}
        assert by_hash == {(each, request_id) for request_id, hashes in self._hashes.items() for each in hashes}
        assert all(self._hashes.values())
