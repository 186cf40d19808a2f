"""Which request waits for which hash, compared with a model: a set of such pairs."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.frontend.media_waiters import MediaWaiters
from tests.scheduling.long_run import thorough

HASHES, REQUESTS = st.sampled_from("abcd"), st.sampled_from(["1", "2", "3"])


def test_a_hash_is_known_until_taken_even_if_all_waiting_requests_left() -> None:
    waiters = MediaWaiters[str]()
    waiters.add("a", "1", "first")
    assert waiters.leave("1") == ["a"]
    assert "a" in waiters
    assert not waiters.has_any("a")
    assert waiters.take("a") == {}
    assert "a" not in waiters


class WaitersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.waiters = MediaWaiters[int]()
        self.known: dict[str, dict[str, int]] = {}

    @rule(media_hash=HASHES, request_id=REQUESTS, waiter=st.integers())
    def add(self, media_hash: str, request_id: str, waiter: int) -> None:
        self.waiters.add(media_hash, request_id, waiter)
        self.known.setdefault(media_hash, {})[request_id] = waiter

    @rule(request_id=REQUESTS)
    def leave(self, request_id: str) -> None:
        left = {media_hash for media_hash, its in self.known.items() if its.pop(request_id, None) is not None}
        assert sorted(self.waiters.leave(request_id)) == sorted(each for each in left if not self.known[each])

    @rule(media_hash=HASHES)
    def take(self, media_hash: str) -> None:
        assert self.waiters.take(media_hash) == self.known.pop(media_hash, {})

    @rule()
    def clear(self) -> None:
        self.waiters.clear()
        self.known.clear()

    @invariant()
    def knows_the_same(self) -> None:
        self.waiters.check_invariants()
        for media_hash in "abcd":
            assert (media_hash in self.waiters) == (media_hash in self.known)
            assert self.waiters.has_any(media_hash) == bool(self.known.get(media_hash))


WaitersMachine.TestCase.settings = thorough(60)
TestWaitersMachine = WaitersMachine.TestCase
