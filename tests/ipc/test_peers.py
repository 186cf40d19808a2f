"""A peer can be found by all three of its names, or by none."""

import pytest

from keepsight.ipc.peers import Peer, Peers, Source


def test_a_peer_is_found_by_each_of_its_names_until_it_is_removed() -> None:
    peers, peer = Peers(), Peer("a", Source(b"1", 7))
    peers.add(peer)
    peers.add(other := Peer("b", Source(b"2", 8)))
    peers.check_invariants()
    assert peers.from_source(Source(b"1", 9)) is peers.named("a") is peers.at_fd(7) is peer
    peers.remove(peer)
    peers.check_invariants()
    assert peers.from_source(peer.source) is peers.named("a") is peers.at_fd(7) is None
    assert peers.all() == [other]


@pytest.mark.parametrize("taken", [Peer("a", Source(b"2", 8)), Peer("b", Source(b"2", 7))])
def test_a_name_in_use_is_not_given_twice(taken: Peer) -> None:
    peers = Peers()
    peers.add(Peer("a", Source(b"1", 7)))
    with pytest.raises(AssertionError):
        peers.add(taken)
