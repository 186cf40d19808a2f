"""The simulator's results are correct, and no policy exceeds the offline bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cache_traces import TRACES
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.simulate import distinct_bytes, offline_bound, simulate, simulate_belady
from keepsight.tiers.trace import Access
from tests.scheduling.long_run import thorough


def trace_of(keys: str) -> list[Access]:
    return [Access(float(step), key, 1, 1.0) for step, key in enumerate(keys)]


def test_lru_by_hand() -> None:
    assert simulate(trace_of("abcabcaab"), "lru", 2) == pytest.approx(1 / 9)


def test_belady_by_hand() -> None:
    # a b miss, c misses and is not kept; a b hit; c misses and replaces b; a a hit; b misses.
    assert simulate_belady(trace_of("abcabcaab"), 2) == pytest.approx(5 / 9)


def test_entries_larger_than_the_cache_are_never_held() -> None:
    trace = [Access(0, "large", 10, 1), Access(1, "large", 10, 1), Access(2, "small", 1, 1), Access(3, "small", 1, 1)]
    for name in POLICIES:
        assert simulate(trace, name, 5) == 0.25
    assert simulate_belady(trace, 5) == 0.25
    assert offline_bound(trace, 5) == 0.25


accesses = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), max_size=60)


@thorough(100)
@given(accesses, st.integers(1, 12))
def test_nothing_saves_more_than_the_bound(drawn: list[tuple[int, int]], max_bytes: int) -> None:
    trace = [Access(float(step), str(key), 1 + key % 3, float(seconds)) for step, (key, seconds) in enumerate(drawn)]
    bound = offline_bound(trace, max_bytes)
    for name in POLICIES:
        assert simulate(trace, name, max_bytes) <= bound + 1e-9
    assert simulate_belady(trace, max_bytes) <= bound + 1e-9


@thorough(100)
@given(st.text("abcdefg", max_size=60), st.integers(1, 6))
def test_with_equal_entries_no_policy_beats_belady(keys: str, max_bytes: int) -> None:
    best = simulate_belady(trace_of(keys), max_bytes)
    assert all(simulate(trace_of(keys), name, max_bytes) <= best for name in POLICIES)


@pytest.mark.parametrize("name", TRACES)
def test_auto_is_within_three_points_of_the_better_of_its_two(name: str) -> None:
    trace = TRACES[name](12_000)
    max_bytes = distinct_bytes(trace) // 20
    shares = {policy: simulate(trace, policy, max_bytes) for policy in ("lru", "s3fifo", "auto")}
    assert shares["auto"] >= max(shares["lru"], shares["s3fifo"]) - 0.03
