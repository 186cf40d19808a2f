"""Each policy names only what is held, and what it should."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from keepsight.tiers.policies import POLICIES, Auto, Cost, Lru, S3Fifo
from tests.scheduling.long_run import thorough


def test_lru_lets_go_what_was_used_least_recently() -> None:
    policy = Lru()
    for key in "abc":
        policy.add(key, 1, 1)
    policy.use("a")
    assert [policy.evict() for _ in range(3)] == ["b", "c", "a"]


def test_cost_lets_go_what_saves_least_for_its_bytes() -> None:
    policy = Cost()
    policy.add("dear", 10, 100)
    policy.add("large", 100, 100)
    policy.add("cheap", 10, 1)
    policy.add("used", 10, 1)
    for _ in range(20):
        policy.use("used")
    assert [policy.evict() for _ in range(4)] == ["cheap", "large", "used", "dear"]


def test_cost_forgets_old_merits() -> None:
    policy = Cost()
    policy.add("once loved", 1, 1)
    for _ in range(5):
        policy.use("once loved")
    for number in range(100):
        policy.add(str(number), 1, 1)
        policy.use(str(number))
        policy.evict()
    assert "once loved" not in policy


def test_s3fifo_keeps_what_is_used_from_what_comes_once() -> None:
    policy = S3Fifo(10)
    for _ in range(2):
        for key in ("a", "b"):
            if key in policy:
                policy.use(key)
                policy.use(key)
            else:
                policy.add(key, 1, 1)
    for number in range(100):
        policy.add(str(number), 1, 1)
        if len(policy) > 10:
            policy.evict()
    assert "a" in policy
    assert "b" in policy


def test_s3fifo_trusts_who_comes_back() -> None:
    policy = S3Fifo(10)
    policy.add("back", 1, 1)
    for number in range(10):
        policy.add(str(number), 1, 1)
    assert policy.evict() == "back"
    policy.add("back", 1, 1)
    for number in range(10, 60):
        policy.add(str(number), 1, 1)
        policy.evict()
    assert "back" in policy


def test_auto_follows_the_one_that_would_save_more() -> None:
    policy = Auto(10)
    hot = [f"hot{number}" for number in range(4)]
    for step in range(3000):
        for key in [hot[step % 4]] * 3 + [f"once{step}-{number}" for number in range(4)]:
            if key in policy:
                policy.use(key)
                continue
            if len(policy) == 10:
                policy.evict()
            policy.add(key, 1, 1)
    assert isinstance(policy._followed.policy, S3Fifo)
    assert all(key in policy for key in hot)


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_calls_keeps_it_right(name: str) -> None:
    class Calls(_Calls):
        policy_name = name

    run_state_machine_as_test(Calls, settings=thorough(25))


class _Calls(RuleBasedStateMachine):
    policy_name = ""
    keys = st.integers(0, 30).map(str)
    max_bytes = 20

    def __init__(self) -> None:
        super().__init__()
        self.policy = POLICIES[self.policy_name](self.max_bytes)
        self.held: dict[str, int] = {}

    @rule(key=keys, size=st.integers(1, 5), seconds=st.floats(0, 10))
    def ask(self, key: str, size: int, seconds: float) -> None:
        if key in self.held:
            self.policy.use(key)
            return
        while sum(self.held.values()) + size > self.max_bytes:
            self.evict()
        self.policy.add(key, size, seconds)
        self.held[key] = size

    @rule(key=keys)
    def remove(self, key: str) -> None:
        if self.held.pop(key, None) is not None:
            self.policy.remove(key)

    @precondition(lambda self: self.held)
    @rule()
    def evict(self) -> None:
        del self.held[self.policy.evict()]

    @invariant()
    def knows_what_is_held(self) -> None:
        assert len(self.policy) == len(self.held)
        assert all(key in self.policy for key in self.held)
