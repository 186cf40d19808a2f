"""Which entries are evicted and which never are: single cases, then random ones against a model with a plain list."""

import logging
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from keepsight.errors import EverythingPinnedError
from keepsight.lru_cache import CacheStat, LruCache
from tests.scheduling.long_run import thorough

MAX_BYTES = 10


def cache_of(*words: str) -> LruCache[str, str]:
    """Return a cache of words; each word is its own value, and its size is its length."""
    cache = LruCache[str, str](MAX_BYTES, len)
    for word in words:
        assert cache.put_if_fits(word, word)
    return cache


def held(cache: LruCache[str, Any], *words: str) -> list[str]:
    return [word for word in words if cache.is_cached(word)]


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache = cache_of("aaaa", "bbbb")
    assert cache.get_and_update("aaaa") == "aaaa"
    assert cache.put_if_fits("cccc", "cccc")
    assert held(cache, "aaaa", "bbbb", "cccc") == ["aaaa", "cccc"]


def test_no_more_is_evicted_than_necessary() -> None:
    cache = cache_of("aaaa", "bbb", "ccc")
    assert cache.put_if_fits("d", "d")
    assert held(cache, "aaaa", "bbb", "ccc", "d") == ["bbb", "ccc", "d"]
    assert cache.num_bytes == 7


def test_is_cached_changes_neither_order_nor_hit_counts() -> None:
    cache = cache_of("aaaa", "bbbb")
    assert cache.is_cached("aaaa")
    assert cache.stat() == CacheStat(0, 0)
    assert cache.put_if_fits("cccc", "cccc")
    assert not cache.is_cached("aaaa")


def test_touching_changes_only_the_order() -> None:
    cache = cache_of("aaaa", "bbbb")
    assert cache.touch("aaaa")
    assert not cache.touch("zzzz")
    assert cache.stat() == CacheStat(0, 0)
    assert cache.put_if_fits("cccc", "cccc")
    assert held(cache, "aaaa", "bbbb") == ["aaaa"]


def test_an_entry_larger_than_the_cache_evicts_nothing_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cache_of("aaaa", "bbbb")
    with caplog.at_level(logging.WARNING):
        for letter in "xyz":
            assert not cache.put_if_fits(letter, letter * 11)
    assert held(cache, "aaaa", "bbbb", "x") == ["aaaa", "bbbb"]
    assert len(caplog.records) == 1
    assert cache.put_if_fits("x", "x" * 10)


def test_an_entry_stays_from_its_first_pin_until_it_is_unpinned_once() -> None:
    cache = cache_of("aaaa", "bbbb")
    cache.pin("aaaa")
    cache.pin("aaaa")
    assert cache.put_if_fits("cccc", "cccc")
    assert held(cache, "aaaa", "bbbb", "cccc") == ["aaaa", "cccc"]
    cache.clear()
    assert held(cache, "aaaa", "cccc") == ["aaaa"]
    cache.unpin("aaaa")
    cache.clear()
    assert cache.num_bytes == 0


def test_entries_marked_evict_first_are_evicted_even_if_used_until_unmarked() -> None:
    cache = cache_of("aaaa", "bbbb")
    cache.evict_first("bbbb")
    cache.touch("bbbb")
    cache.put_if_fits("cccc", "cccc")
    assert held(cache, "aaaa", "bbbb", "cccc") == ["aaaa", "cccc"]
    for word in ("aaaa", "cccc", "zzzz"):
        cache.evict_first(word)
    cache.pin("cccc")
    cache.undo_evict_first("aaaa")
    cache.put_if_fits("dddd", "dddd")
    assert held(cache, "aaaa", "cccc", "dddd") == ["cccc", "dddd"]
    cache.check_invariants()


def test_an_error_with_the_numbers_is_raised_if_everything_is_pinned() -> None:
    cache = cache_of("aaaa", "bb", "ccc")
    cache.pin("aaaa")
    cache.pin("ccc")
    with pytest.raises(EverythingPinnedError, match="no room for 4 bytes: 7 of the cache's 10 are pinned"):
        cache.put_if_fits("dddd", "dddd")
    assert held(cache, "aaaa", "bb", "ccc") == ["aaaa", "bb", "ccc"]


def test_pinning_a_missing_key_or_unpinning_an_unpinned_one_raises() -> None:
    cache = cache_of("aaaa")
    with pytest.raises(KeyError, match="zzzz"):
        cache.pin("zzzz")
    with pytest.raises(KeyError, match="aaaa"):
        cache.unpin("aaaa")
    cache.check_invariants()


def test_deltas_reset_with_each_read_and_totals_do_not() -> None:
    cache = cache_of("aaaa")
    for word in ("aaaa", "zzzz", "aaaa"):
        cache.get_and_update(word)
    assert cache.stat(delta=True) == CacheStat(2, 3)
    assert cache.stat(delta=True) == CacheStat(0, 0)
    cache.get_and_update("zzzz")
    assert cache.stat() == CacheStat(2, 4)
    assert cache.stat(delta=True) == CacheStat(0, 1)


KEYS = st.sampled_from("abcdefgh")


class CacheAgainstAList(RuleBasedStateMachine):
    """The model: a list of keys and sizes, least recently used first, and the keys to evict before all others."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []
        self.cache = LruCache[str, bytes](MAX_BYTES, len, on_drop=self.dropped.append)
        self.model: list[tuple[str, bytes]] = []
        self.pins: list[str] = []
        self.first: list[str] = []
        self.hits: list[bool] = []
        self.num_reported = self.num_put = 0

    def find(self, key: str) -> bytes | None:
        return dict(self.model).get(key)

    def renew(self, key: str) -> None:
        self.model.sort(key=lambda entry: entry[0] == key)

    @rule(key=KEYS)
    def get(self, key: str) -> None:
        assert self.cache.get_and_update(key) == self.find(key)
        self.hits.append(self.find(key) is not None)
        self.renew(key)

    @rule(key=KEYS)
    def touch(self, key: str) -> None:
        assert self.cache.touch(key) == (self.find(key) is not None)
        self.renew(key)

    @rule(key=KEYS, size=st.integers(0, MAX_BYTES + 2))
    def put(self, key: str, size: int) -> None:
        if self.find(key) is not None:
            assert self.cache.put_if_fits(key, bytes(size))
            self.renew(key)
            return
        staying = [(each, value) for each, value in self.model if each in self.pins]
        leaving = [entry for entry in self.model if entry not in staying]
        leaving.sort(key=lambda entry: -self.first.index(entry[0]) if entry[0] in self.first else 1)
        if size > MAX_BYTES:
            assert not self.cache.put_if_fits(key, bytes(size))
        elif total(staying) + size > MAX_BYTES:
            with pytest.raises(EverythingPinnedError):
                self.cache.put_if_fits(key, bytes(size))
        else:
            while total(staying + leaving) + size > MAX_BYTES:
                leaving.pop(0)
            assert self.cache.put_if_fits(key, bytes(size))
            self.num_put += 1
            self.keep([entry for entry in self.model if entry in staying + leaving])
            self.model.append((key, bytes(size)))

    def keep(self, model: list[tuple[str, bytes]]) -> None:
        self.model = model
        self.first = [key for key in self.first if self.find(key) is not None]

    @rule(key=KEYS)
    def evict_first(self, key: str) -> None:
        self.cache.evict_first(key)
        if self.find(key) is not None:
            self.first = [*(each for each in self.first if each != key), key]

    @rule(key=KEYS)
    def undo_evict_first(self, key: str) -> None:
        self.cache.undo_evict_first(key)
        self.first = [each for each in self.first if each != key]
        self.renew(key)

    @rule(key=KEYS)
    def pin(self, key: str) -> None:
        if self.find(key) is None:
            with pytest.raises(KeyError):
                self.cache.pin(key)
        else:
            self.cache.pin(key)
            self.pins = sorted({*self.pins, key})

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.pins))
        self.pins.remove(key)
        self.cache.unpin(key)

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        self.cache.drop(key)
        self.keep([entry for entry in self.model if entry[0] != key or key in self.pins])

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.keep([(key, value) for key, value in self.model if key in self.pins])

    @rule()
    def report_delta(self) -> None:
        new_hits, self.num_reported = self.hits[self.num_reported :], len(self.hits)
        assert self.cache.stat(delta=True) == CacheStat(sum(new_hits), len(new_hits))

    @invariant()
    def the_same_is_held(self) -> None:
        self.cache.check_invariants()
        assert held(self.cache, *"abcdefgh") == sorted(key for key, _ in self.model)
        assert self.cache.num_bytes == total(self.model)
        assert len(self.dropped) == self.num_put - len(self.model)
        assert self.cache.stat() == CacheStat(sum(self.hits), len(self.hits))


def total(entries: list[tuple[str, bytes]]) -> int:
    return sum(len(value) for _, value in entries)


def test_the_cache_behaves_like_a_plain_list() -> None:
    run_state_machine_as_test(CacheAgainstAList, settings=thorough(60))
