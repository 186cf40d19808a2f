"""Calls a policy in any order, as a cache with a byte budget does."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from keepsight.tiers.policies import Policy

MAX_BYTES = 20


class PolicyCalls(RuleBasedStateMachine):
    keys = st.integers(0, 20).map(str)

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        # Bytes by key.
        self.held: dict[str, int] = {}

    def evictable(self) -> set[str]:
        return set(self.held)

    @rule(key=keys, size=st.integers(1, 5), seconds=st.floats(0, 10))
    def use_or_add(self, key: str, size: int, seconds: float) -> None:
        if key in self.held:
            self.policy.use(key)
            return
        while sum(self.held.values()) + size > MAX_BYTES and self.evictable():
            self.evict()
        self.policy.add(key, size, seconds)
        self.held[key] = size

    @rule(key=keys)
    def remove(self, key: str) -> None:
        if self.held.pop(key, None) is not None:
            self.policy.remove(key)

    @precondition(lambda self: self.evictable())
    @rule()
    def evict(self) -> None:
        key = self.policy.evict()
        assert key in self.evictable()
        del self.held[key]

    @invariant()
    def holds_the_same_keys(self) -> None:
        assert len(self.policy) == len(self.held)
        assert all(key in self.policy for key in self.held)
