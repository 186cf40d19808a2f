"""The contract of every tier, under every policy."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.redis_tier import RedisTier
from keepsight.tiers.tier import StoredArray
from tests.tiers.any_order import check_any_order
from tests.tiers.arrays import array_of, assert_equal, key_of
from tests.tiers.redis_servers import REAL, FakeServer, real_server

MAX_BYTES = 10 * 4096
AnyTier = HostTier | DiskTier | RedisTier
needs_redis = pytest.mark.skipif(REAL is None, reason="NO REAL REDIS: redis-server is not installed")


@pytest.fixture(params=["host", "disk", "fake redis", pytest.param("redis", marks=needs_redis)])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyTier]:
    with ExitStack() as stack:
        tier: AnyTier
        if request.param == "host":
            tier = HostTier(MAX_BYTES)
        elif request.param == "disk":
            tier = DiskTier(tmp_path, MAX_BYTES)
        elif request.param == "fake redis":
            server = FakeServer()
            stack.callback(server.close)
            tier = RedisTier(server.url)
        else:
            url, _ = stack.enter_context(real_server())
            tier = RedisTier(url, MAX_BYTES)
        yield tier
        tier.check_invariants()
        tier.close()


def test_entries_are_returned_bit_for_bit(tier: AnyTier) -> None:
    for number in range(3):
        assert tier.put(key_of(number), array_of(number))
    for number in range(3):
        assert_equal(tier.get(key_of(number)), array_of(number))


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 1, 2), (1, 2, 3, 4, 1, 1, 1, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype_and_shape_are_preserved(tier: AnyTier, shape: tuple[int, ...], dtype: str) -> None:
    num_bytes = int(np.prod(shape, dtype=int)) * (2 if dtype == "bfloat16" else 4)
    array = StoredArray(dtype, shape, memoryview(bytes(range(num_bytes))), 1.5)
    assert tier.put(key_of(0), array)
    assert_equal(tier.get(key_of(0)), array)


def test_missing_and_cleared_entries_are_none(tier: AnyTier) -> None:
    assert tier.get(key_of(0)) is None
    for number in range(3):
        tier.put(key_of(number), array_of(number))
    tier.clear()
    assert all(tier.get(key_of(number)) is None and not tier.has(key_of(number)) for number in range(3))


def test_neither_hits_nor_misses_count_as_damaged(tier: AnyTier) -> None:
    tier.put(key_of(0), array_of(0))
    tier.get(key_of(0))
    tier.get(key_of(1))
    assert tier.stats().num_damaged == 0


def test_an_entry_larger_than_the_tier_is_refused_with_one_log_line_and_evicts_nothing(
    tier: AnyTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.put(key_of(0), array_of(0))
    if tier.stats().max_bytes is None:
        pytest.skip("the budget is the server's own")
    for number in (1, 2):
        assert not tier.put(key_of(number), array_of(number, 2 * MAX_BYTES))
    [message] = caplog.messages
    assert int(re.findall(r"\d+", message)[0]) >= 2 * MAX_BYTES
    assert f"exceeds the {MAX_BYTES} bytes of" in message
    assert_equal(tier.get(key_of(0)), array_of(0))


def test_the_budget_holds_and_used_entries_stay(tier: AnyTier) -> None:
    if tier.stats().max_bytes is None:
        pytest.skip("the budget is the server's own")
    for number in range(8):
        tier.put(key_of(number), array_of(number))
    for number in range(8, 40):
        assert tier.get(key_of(0)) is not None
        tier.put(key_of(number), array_of(number))
        tier.check_invariants()
    assert tier.get(key_of(39)) is not None
    assert tier.get(key_of(1)) is None
    assert tier.stats().num_evictions > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_invariants_hold_for_any_policy_and_order_of_calls(policy: str, kind: str, tmp_path: Path) -> None:
    folders = iter(range(1_000_000))

    def make() -> AnyTier:
        if kind == "host":
            return HostTier(MAX_BYTES, policy)
        return DiskTier(tmp_path / str(next(folders)), MAX_BYTES, policy)

    check_any_order(lambda: _Calls(make()), 8, 30)


class _Calls(RuleBasedStateMachine):
    keys = st.integers(0, 15)

    def __init__(self, tier: AnyTier) -> None:
        super().__init__()
        self.tier = tier

    @rule(number=keys)
    def put(self, number: int) -> None:
        # A key always names the same value.
        assert self.tier.put(key_of(number), self.array(number))
        assert self.tier.has(key_of(number))

    @rule(number=keys)
    def get(self, number: int) -> None:
        was_known = self.tier.has(key_of(number))
        found = self.tier.get(key_of(number))
        assert (found is not None) == was_known
        if found is not None:
            assert_equal(found, self.array(number))

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        assert not self.tier.stats().num_entries

    @staticmethod
    def array(number: int) -> StoredArray:
        return array_of(number, 3000 + 4096 * (number % 4))

    @invariant()
    def holds(self) -> None:
        self.tier.check_invariants()

    def teardown(self) -> None:
        self.tier.close()
