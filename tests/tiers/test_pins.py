"""Pinned entries stay, no matter who pinned them and when; all others are evicted as usual."""

import errno
import itertools
import logging
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from keepsight.errors import TierError
from keepsight.ipc import ledger
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.known_files import KnownFiles
from keepsight.tiers.pins import pins_in
from keepsight.tiers.policies import POLICIES
from keepsight.tiers.tier import ignore_drop
from tests.tiers.any_order import check_any_order
from tests.tiers.arrays import array_of, assert_equal, key_of
from tests.tiers.policy_calls import MAX_BYTES, PolicyCalls
from tests.wait_until import PATIENCE_SECONDS, wait_until

PAGE = 4096


def opened(folder: Path, num_pages: int = 10, policy: str = "lru") -> DiskTier:
    return DiskTier(folder, num_pages * PAGE, policy)


def put(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.put(key_of(number), array_of(number))


def held(tier: DiskTier) -> set[int]:
    sizes = tier.list_sizes()
    return {number for number in range(60) if key_of(number) in sizes}


@pytest.mark.parametrize("policy", POLICIES)
def test_entries_pinned_while_a_server_runs_stay_under_any_policy(tmp_path: Path, policy: str) -> None:
    tier = opened(tmp_path, policy=policy)
    put(tier, *range(5))
    pins_in(tmp_path).add(key_of(0), key_of(3))
    put(tier, *range(5, 40))
    assert {0, 3} <= held(tier)
    assert len(held(tier)) == 10
    assert_equal(tier.get(key_of(3)), array_of(3))
    pins_in(tmp_path).remove(key_of(3))
    # Some policies then treat it as a new entry.
    put(tier, *range(40, 60))
    assert 0 in held(tier)
    assert 3 not in held(tier)
    tier.check_invariants()
    tier.close()


def test_pins_outlive_servers_and_apply_to_all_that_share_the_folder(tmp_path: Path) -> None:
    first = opened(tmp_path)
    put(first, *range(10))
    pins_in(tmp_path).add(key_of(0))
    first.close()
    tiers = [opened(tmp_path), opened(tmp_path)]
    for number in range(10, 40):
        put(tiers[number % 2], number)
        assert 0 in held(tiers[0])
        tiers[0].check_invariants()
    for tier in tiers:
        tier.close()


def test_an_entry_present_after_its_pin_stays_while_servers_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "_PATIENCE_SECONDS", PATIENCE_SECONDS)  # the lock is not fair
    servers, observer, is_over = [opened(tmp_path), opened(tmp_path)], opened(tmp_path, 1000), threading.Event()
    put(observer, *range(10))

    def serve(server: DiskTier, first: int) -> None:
        for number in itertools.count(first, 2):
            if is_over.is_set():
                return
            server.put(key_of(number), array_of(number))

    pins, pinned = pins_in(tmp_path), set[str]()

    def five_are_pinned() -> bool:
        keys = list(observer.list_sizes())
        if not keys:
            return False
        pins.add(key := random.choice(keys))
        if key in observer.list_sizes():
            pinned.add(key)
        else:
            pins.remove(key)
        return len(pinned) == 5

    with ThreadPoolExecutor() as threads:
        serving = [threads.submit(serve, each, 10 + place) for place, each in enumerate(servers)]
        try:
            wait_until(five_are_pinned)
        finally:
            is_over.set()
    assert [each.result() for each in serving] == [None, None]
    assert pinned <= observer.list_sizes().keys()
    servers[0].check_invariants()
    for tier in (*servers, observer):
        tier.close()


def test_a_folder_full_of_pins_warns_once_and_is_read_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(tmp_path)
    put(tier, *range(10))
    pins_in(tmp_path).add(*map(key_of, range(10)))
    with caplog.at_level(logging.ERROR):
        for number in range(10, 13):
            assert not tier.put(key_of(number), array_of(number))
    assert [record.message for record in caplog.records] == [
        f"{tmp_path} accepts no more entries: 40960 of 40960 bytes are pinned (keepsight cache unpin)"
    ]
    for number in range(10):
        assert_equal(tier.get(key_of(number)), array_of(number))
    pins_in(tmp_path).remove(key_of(4))
    put(tier, 10)
    assert held(tier) == {*range(11)} - {4}
    tier.check_invariants()
    tier.close()


def test_a_budget_smaller_than_the_pins_makes_the_folder_read_only(tmp_path: Path) -> None:
    large = opened(tmp_path)
    put(large, *range(10))
    pins_in(tmp_path).add(*map(key_of, range(6)))
    large.close()
    small = opened(tmp_path, 4)
    assert_equal(small.get(key_of(5)), array_of(5))
    assert held(small) == {*range(6)}
    assert not small.put(key_of(20), array_of(20))
    small.close()


def test_a_damaged_or_cleared_entry_is_pinned_again_when_it_is_put_again(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    put(tier, 0, 1)
    pins_in(tmp_path).add(key_of(0), key_of(1))
    for number in (0, 1):
        (tmp_path / "entries" / key_of(number)).write_bytes(b"")
        assert tier.get(key_of(number)) is None
    assert held(tier) == set()
    put(tier, 0, *range(2, 30))
    assert 0 in held(tier)
    tier.clear()
    assert held(tier) == set()
    assert set(pins_in(tmp_path)) == {key_of(0), key_of(1)}
    tier.close()


def test_pins_of_others_are_refused_when_the_folder_is_opened(tmp_path: Path) -> None:
    pins_in(tmp_path).add(key_of(0))
    (tmp_path / "pins").chmod(0o755)
    tier = opened(tmp_path)
    with pytest.raises(TierError, match=f"{tmp_path}/pins must be this user's"):
        tier.open()
    (tmp_path / "pins").chmod(0o700)
    put(tier, *range(20))
    tier.close()


def test_nothing_is_evicted_while_pins_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened(tmp_path)
    put(tier, *range(10))
    pins_in(tmp_path).add(key_of(0))
    real = os.scandir

    def refuse(path: Path) -> Iterator[os.DirEntry[str]]:
        if path == tmp_path / "pins":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    with monkeypatch.context() as patched:
        patched.setattr("keepsight.ipc.shared_names.os.scandir", refuse)
        assert not tier.put(key_of(10), array_of(10))
        assert_equal(tier.get(key_of(1)), array_of(1))
    assert caplog.messages == [f"{tmp_path} accepts no more entries: [Errno 13] Permission denied: '{tmp_path}/pins'"]
    assert held(tier) == {*range(10)}
    tier.close()


def test_listing_pins_creates_no_folder(tmp_path: Path) -> None:
    assert not list(pins_in(tmp_path))
    pins_in(tmp_path).remove(key_of(1))
    assert not list(tmp_path.iterdir())


# Eviction order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_any_order_of_calls_evicts_everything_but_pinned_entries(name: str) -> None:
    check_any_order(lambda: _Calls(_Order(POLICIES[name](MAX_BYTES), ignore_drop)), 15)


class _Order(KnownFiles):
    """Known files with the method names of a policy."""

    def add(self, key: str, num_bytes: int, seconds: float) -> None:
        self.learn(key, num_bytes, seconds, 0)

    def use(self, key: str) -> None:
        self.learn(key, self.sizes[key], 0.0, 0)

    def remove(self, key: str) -> None:
        self.forget(key)

    def evict(self) -> str:
        chosen = self.choose()
        assert chosen is not None
        return chosen[0]


class _Calls(PolicyCalls):
    def __init__(self, known: _Order) -> None:
        super().__init__(known)
        self.known = known
        self.pinned: frozenset[str] = frozenset()

    def evictable(self) -> set[str]:
        return self.held.keys() - self.pinned

    @rule(pinned=st.frozensets(PolicyCalls.keys))
    def spare(self, pinned: frozenset[str]) -> None:
        self.known.spare(pinned)
        self.pinned = pinned

    @invariant()
    def check_known_files(self) -> None:
        self.known.check_invariants()

    def teardown(self) -> None:
        """Evict every entry that is not pinned, once each."""
        while self.evictable():
            self.evict()
        assert self.known.choose() is None
