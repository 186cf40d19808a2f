"""Each policy evicts only keys that it holds, in its specified order."""

import pytest

from keepsight.tiers.policies import POLICIES, Auto, Cost, Lru, S3Fifo
from tests.tiers.any_order import check_any_order
from tests.tiers.policy_calls import MAX_BYTES, PolicyCalls


def test_lru_evicts_the_least_recently_used() -> None:
    policy = Lru()
    for key in "abc":
        policy.add(key, 1, 1)
    policy.use("a")
    assert [policy.evict() for _ in range(3)] == ["b", "c", "a"]


def test_cost_evicts_what_saves_least_per_byte() -> None:
    policy = Cost()
    policy.add("dear", 10, 100)
    policy.add("large", 100, 100)
    policy.add("cheap", 10, 1)
    policy.add("twice", 10, 6)
    policy.use("twice")
    policy.add("used", 10, 1)
    for _ in range(20):
        policy.use("used")
    assert [policy.evict() for _ in range(5)] == ["cheap", "large", "twice", "used", "dear"]


def test_the_heap_of_cost_stays_small_under_many_uses() -> None:
    policy = Cost()
    for key in "ab":
        policy.add(key, 1, 1)
    for _ in range(1000):
        policy.use("a")
    assert len(policy._heap) < 100
    assert [policy.evict() for _ in range(2)] == ["b", "a"]


def test_cost_ages_old_entries_out() -> None:
    policy = Cost()
    policy.add("once loved", 1, 1)
    for _ in range(5):
        policy.use("once loved")
    for number in range(100):
        policy.add(str(number), 1, 1)
        policy.use(str(number))
        policy.evict()
    assert "once loved" not in policy


def test_s3fifo_protects_used_entries_from_a_scan() -> None:
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


def test_s3fifo_evicts_unused_newcomers_before_used_entries() -> None:
    policy = S3Fifo(20)
    for key in "abcde":
        policy.add(key, 1, 1)
    for key in "aabb":
        policy.use(key)
    assert policy.evict() == "c"
    policy.use("a")
    assert [policy.evict() for _ in range(4)] == ["b", "a", "d", "e"]


def test_s3fifo_keeps_entries_that_come_back() -> None:
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


def test_auto_follows_the_policy_that_would_save_more() -> None:
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


def test_auto_evicts_nothing_for_an_entry_that_alone_exceeds_the_budget() -> None:
    policy = Auto(10)
    policy.add("small", 1, 1)
    policy.add("large", 11, 1)
    policy.use("large")
    assert [policy.evict() for _ in range(2)] == ["large", "small"]


@pytest.mark.parametrize("name", POLICIES)
def test_invariants_hold_under_any_order_of_calls(name: str) -> None:
    check_any_order(lambda: PolicyCalls(POLICIES[name](MAX_BYTES)), 25)
