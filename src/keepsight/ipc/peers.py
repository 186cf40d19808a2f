"""The frontends that an engine has welcomed, by each of their names.

Knows nothing of sockets. A peer's three names (routing id, descriptor, frontend id) are added and removed together.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """The connection that a message came from: ZeroMQ's id of it, and its descriptor, which the kernel reuses later."""

    routing_id: bytes
    fd: int


@dataclass(slots=True, eq=False)
class Peer:
    frontend_id: str
    source: Source
    has_sent_unreadable: bool = False


class Peers:
    def __init__(self) -> None:
        self._by_routing_id: dict[bytes, Peer] = {}
        self._by_frontend_id: dict[str, Peer] = {}

    def all(self) -> list[Peer]:
        return list(self._by_routing_id.values())

    def from_source(self, source: Source) -> Peer | None:
        return self._by_routing_id.get(source.routing_id)

    def named(self, frontend_id: str) -> Peer | None:
        return self._by_frontend_id.get(frontend_id)

    def at_fd(self, fd: int) -> Peer | None:
        return next((peer for peer in self._by_routing_id.values() if peer.source.fd == fd), None)

    def add(self, peer: Peer) -> None:
        assert self.at_fd(peer.source.fd) is None, peer
        assert peer.frontend_id not in self._by_frontend_id, peer
        self._by_routing_id[peer.source.routing_id] = peer
        self._by_frontend_id[peer.frontend_id] = peer

    def remove(self, peer: Peer) -> None:
        del self._by_routing_id[peer.source.routing_id]
        del self._by_frontend_id[peer.frontend_id]

    def check_invariants(self) -> None:
        for routing_id, peer in self._by_routing_id.items():
            assert peer.source.routing_id == routing_id
            assert self._by_frontend_id[peer.frontend_id] is peer
            assert self.at_fd(peer.source.fd) is peer
        assert len(self._by_routing_id) == len(self._by_frontend_id)
