"""Use and eviction of entries: single cases, then a comparison with a model that keeps plain lists."""

import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keepsight.engine_config import EncoderCacheConfig
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import Adapter
from keepsight.scheduling.encoder_cache_manager import EncoderCacheManager, EncoderUser, encoder_key
from keepsight.scheduling.holdings import Holdings
from tests.scheduling.long_run import thorough

A, B, C = (("a", 0), 0), (("b", 0), 0), (("c", 0), 0)
BYTES = 10


def manager(num_embeddings: int = 6, is_shared: bool = True) -> EncoderCacheManager:
    config = EncoderCacheConfig(max_bytes=num_embeddings * BYTES, bytes_per_embedding=BYTES, is_shared=is_shared)
    return EncoderCacheManager(config, Holdings())


def hold(cache: EncoderCacheManager, user: EncoderUser, key: str, num_embeddings: int = 2) -> None:
    assert cache.try_begin(user, key, num_embeddings)
    cache.finish(key)


def keep(cache: EncoderCacheManager, *keys: str, num_embeddings: int = 2) -> None:
    """Leave idle entries, released in this order."""
    for key in keys:
        hold(cache, C, key, num_embeddings)
        cache.release(C, key)


class TestEncoderKey:
    item = MediaItem("hash", TokenSpan(0, 4), Geometry(8, 8))

    def test_it_is_the_media_hash_while_no_adapter_changes_the_embeddings(self) -> None:
        assert encoder_key(self.item, None) == "hash"
        assert encoder_key(self.item, Adapter("name", "digest")) == "hash"

    def test_an_adapter_that_changes_them_adds_its_name_and_content(self) -> None:
        adapters = [Adapter(name, digest, changes_encoder=True) for name in ("a", "b") for digest in ("x", "y")]
        assert len({encoder_key(self.item, adapter) for adapter in (None, *adapters)}) == 5

    def test_different_names_never_make_the_same_key(self) -> None:
        left, right = Adapter('a", "b', "c", changes_encoder=True), Adapter("a", 'b", "c', changes_encoder=True)
        assert encoder_key(self.item, left) != encoder_key(self.item, right)


class TestUsing:
    def test_an_absent_entry_cannot_be_used(self) -> None:
        assert not manager().try_use(A, "x")

    def test_an_entry_being_encoded_can_be_used_by_others_but_is_not_ready(self) -> None:
        cache = manager()
        cache.try_begin(A, "x", 2)
        assert cache.try_use(B, "x")
        assert not cache.is_ready("x")
        cache.finish("x")
        assert cache.is_ready("x")
        assert (cache.num_entries, cache.num_bytes) == (1, 20)

    def test_an_entry_is_held_for_others_from_the_end_of_its_encoding_until_it_is_forgotten(self) -> None:
        cache = manager()
        assert not cache.is_held("x")
        cache.try_begin(A, "x", 2)
        assert not cache.is_held("x")
        cache.finish("x")
        assert cache.is_held("x")
        cache.forget()
        assert cache.is_ready("x")
        assert not cache.is_held("x")

    def test_an_idle_entry_is_used_again_and_cannot_be_evicted_then(self) -> None:
        cache = manager(2)
        keep(cache, "x")
        assert cache.try_use(A, "x")
        assert not cache.try_begin(B, "y", 1)
        assert cache.is_ready("x")

    def test_one_picture_twice_in_a_request_is_in_use_until_its_last_use_ends(self) -> None:
        cache = manager(2)
        first, second = (("a", 0), 0), (("a", 0), 3)
        hold(cache, first, "x")
        assert cache.try_use(second, "x")
        assert set(cache.uses()) == {(first, "x"), (second, "x")}
        cache.release(first, "x")
        assert not cache.try_begin(B, "y", 1)
        cache.release(second, "x")
        assert cache.try_begin(B, "y", 1)

    def test_an_entry_released_by_one_choice_stays_in_use_by_another(self) -> None:
        cache = manager()
        first, second = (("a", 0), 0), (("a", 1), 0)
        hold(cache, first, "x")
        assert cache.try_use(second, "x")
        cache.release(first, "x")
        assert cache.is_used("x")
        assert [*cache.uses()] == [(second, "x")]
        cache.release(second, "x")
        assert not cache.is_used("x")

    def test_releasing_an_unused_entry_is_a_bug(self) -> None:
        cache = manager()
        hold(cache, A, "x")
        cache.release(A, "x")
        with pytest.raises(KeyError):
            cache.release(A, "x")

    def test_beginning_a_held_entry_is_a_bug(self) -> None:
        cache = manager()
        hold(cache, A, "x")
        with pytest.raises(AssertionError, match="held already"):
            cache.try_begin(B, "x", 2)


class TestRoom:
    def test_idle_entries_are_evicted_whole_the_oldest_released_first(self) -> None:
        cache = manager(6)
        keep(cache, "x", "y", "z")
        assert cache.try_use(A, "x")
        cache.release(A, "x")
        assert cache.try_begin(A, "new", 3)
        assert cache.take_evicted() == ("y", "z")
        assert cache.try_use(B, "x")
        assert cache.num_evictions == 2

    def test_only_as_much_as_necessary_is_evicted(self) -> None:
        cache = manager(6)
        keep(cache, "x", "y")
        assert cache.try_begin(A, "new", 2)
        assert cache.take_evicted() == ()

    def test_a_newcomer_that_has_no_room_evicts_nothing(self) -> None:
        cache = manager(6)
        hold(cache, A, "x", 4)
        keep(cache, "y")
        assert not cache.try_begin(B, "new", 3)
        assert cache.take_evicted() == ()
        assert [*cache.uses()] == [(A, "x")]
        assert cache.is_ready("y")

    def test_an_entry_being_encoded_is_never_evicted_even_without_users(self) -> None:
        cache = manager(2)
        cache.try_begin(A, "x", 2)
        cache.release(A, "x")
        assert not cache.try_begin(B, "y", 2)
        cache.finish("x")
        assert cache.try_begin(B, "y", 2)

    def test_the_runner_hears_of_an_eviction_once(self) -> None:
        cache = manager(2)
        keep(cache, "x")
        cache.try_begin(A, "y", 2)
        assert cache.take_evicted() == ("x",)
        assert cache.take_evicted() == ()

    def test_an_evicted_entry_may_begin_again_before_the_runner_hears_of_it(self) -> None:
        cache = manager(2)
        keep(cache, "x")
        keep(cache, "y")
        assert cache.try_begin(A, "x", 2)
        assert cache.take_evicted() == ("x", "y")


class TestFailing:
    def test_a_failure_returns_all_waiting_users_and_leaves_nothing(self) -> None:
        cache = manager()
        cache.try_begin(A, "x", 2)
        cache.try_use(B, "x")
        assert cache.fail("x") == {A, B}
        assert (cache.num_entries, cache.num_bytes, [*cache.uses()]) == (0, 0, [])
        assert cache.take_evicted() == ()

    def test_a_failure_is_not_remembered(self) -> None:
        cache = manager()
        cache.try_begin(A, "x", 2)
        cache.fail("x")
        assert not cache.try_use(A, "x")
        assert cache.try_begin(A, "x", 2)


class TestWithoutSharing:
    def test_an_entry_is_dropped_with_its_last_user(self) -> None:
        cache = manager(is_shared=False)
        hold(cache, A, "x")
        cache.release(A, "x")
        assert cache.take_evicted() == ("x",)
        assert (cache.num_entries, cache.num_bytes, cache.num_evictions) == (0, 0, 0)

    def test_an_entry_without_users_is_dropped_once_it_is_encoded(self) -> None:
        cache = manager(is_shared=False)
        cache.try_begin(A, "x", 2)
        cache.release(A, "x")
        assert cache.take_evicted() == ()
        cache.finish("x")
        assert cache.take_evicted() == ("x",)


class TestForgetting:
    def test_idle_entries_are_dropped_at_once(self) -> None:
        cache = manager()
        keep(cache, "x", "y")
        cache.forget()
        assert cache.take_evicted() == ("x", "y")
        assert (cache.num_entries, cache.num_evictions) == (0, 0)

    def test_users_of_a_forgotten_entry_keep_it_and_new_requests_do_not_find_it(self) -> None:
        cache = manager()
        hold(cache, A, "x")
        cache.forget()
        assert cache.is_ready("x")
        assert not cache.try_use(B, "x")
        cache.release(A, "x")
        assert cache.take_evicted() == ("x",)

    def test_a_new_entry_waits_until_the_forgotten_one_of_the_same_key_is_dropped(self) -> None:
        cache = manager()
        hold(cache, A, "x")
        cache.forget()
        assert not cache.try_begin(B, "x", 2)
        cache.release(A, "x")
        assert cache.try_begin(B, "x", 2)

    def test_a_forgotten_entry_being_encoded_serves_its_users_and_is_dropped(self) -> None:
        cache = manager()
        cache.try_begin(A, "x", 2)
        cache.forget()
        cache.finish("x")
        assert cache.is_ready("x")
        cache.release(A, "x")
        assert cache.take_evicted() == ("x",)

    def test_a_forgotten_entry_without_users_is_dropped_once_it_is_encoded(self) -> None:
        cache = manager()
        cache.try_begin(A, "x", 2)
        cache.release(A, "x")
        cache.forget()
        cache.finish("x")
        assert (cache.take_evicted(), cache.num_bytes) == (("x",), 0)


class TestOversizedItems:
    def test_an_oversized_item_is_served_outside_the_budget_and_dropped_with_its_last_user(self) -> None:
        cache = manager(2)
        keep(cache, "small")
        hold(cache, A, "large", 3)
        assert cache.try_use(B, "large")
        assert cache.num_bytes == 20
        cache.release(A, "large")
        cache.release(B, "large")
        assert cache.take_evicted() == ("large",)
        assert cache.is_ready("small")

    def test_a_second_oversized_item_waits(self) -> None:
        cache = manager(2)
        hold(cache, A, "large", 3)
        assert not cache.try_begin(B, "larger", 4)
        cache.release(A, "large")
        assert cache.try_begin(B, "larger", 4)

    def test_it_is_warned_of_once(self, caplog: pytest.LogCaptureFixture) -> None:
        cache = manager(2)
        with caplog.at_level(logging.WARNING):
            for key in ("large", "larger"):
                hold(cache, A, key, 3)
                cache.release(A, key)
        (record,) = caplog.records
        assert "30 bytes exceed the encoder cache of 20" in record.getMessage()

    def test_a_cache_of_zero_bytes_serves_items_one_by_one(self) -> None:
        cache = manager(0)
        hold(cache, A, "x", 1)
        assert not cache.try_begin(B, "y", 1)


class TestPins:
    def test_pinned_entries_are_evicted_last(self) -> None:
        cache = manager(6)
        keep(cache, "x", "y", "z")
        cache.pin("x", until=10)
        hold(cache, A, "new", 4)
        assert [cache.is_ready(key) for key in "xyz"] == [True, False, False]
        assert not cache.try_begin(B, "more", 3)
        assert cache.try_begin(B, "more", 2), "a pin is no reason to refuse"
        assert not cache.is_ready("x")

    def test_a_pin_lasts_while_its_picture_is_used_and_ends_with_its_time(self) -> None:
        cache = manager(4)
        hold(cache, A, "x")
        cache.pin("x", until=10)
        cache.release(A, "x")
        keep(cache, "y", "z")
        assert cache.is_ready("x")
        cache.end_pins(10)
        keep(cache, "v", "w")
        assert not cache.is_ready("x")

    def test_absent_forgotten_or_too_large_entries_are_not_pinned(self) -> None:
        cache = manager(4)
        cache.pin("x", until=10)
        hold(cache, A, "x")
        cache.pin("x", until=10)
        cache.forget()
        cache.pin("x", until=10)
        assert cache.num_pinned_bytes == 0
        keep(cache, "y")
        cache.pin("y", until=10)
        cache.check_invariants()
        cache.release(A, "x")
        keep(cache, "z")
        cache.pin("z", until=10)
        keep(cache, "v")
        assert cache.is_ready("y")
        assert not cache.is_ready("z")

    def test_nothing_is_pinned_if_nothing_is_kept(self) -> None:
        cache = manager(4, is_shared=False)
        hold(cache, A, "x")
        cache.pin("x", until=10)
        assert cache.num_pinned_bytes == 0
        cache.release(A, "x")
        cache.check_invariants()
        assert cache.num_entries == 0


class TestProtection:
    def test_protected_entries_are_evicted_after_all_others_and_never_while_anything_is_in_use(self) -> None:
        cache = manager(6)
        keep(cache, "x", "y")
        cache.protect(A, "x")
        hold(cache, B, "z")
        assert cache.try_begin(C, "new", 2)
        assert cache.take_evicted() == ("y",)
        cache.finish("new")
        cache.release(C, "new")
        assert not cache.try_begin(C, "large", 5), "what B uses will be released"
        cache.release(B, "z")
        assert cache.try_begin(C, "large", 5)
        assert cache.take_evicted() == ("new", "z", "x")

    def test_nobody_waits_for_what_is_in_use_if_that_would_not_leave_enough_room(self) -> None:
        cache = manager(8)
        keep(cache, "x", num_embeddings=4)
        cache.protect(A, "x")
        keep(cache, "y")
        hold(cache, B, "z")
        assert cache.try_begin(C, "large", 5)
        assert cache.take_evicted() == ("y", "x")

    @pytest.mark.parametrize(("num_protected", "num_in_use", "num_wanted"), [(3, 4, 6), (6, 2, 5)])
    def test_what_is_in_use_is_waited_for_if_its_room_with_what_is_not_kept_would_be_enough(
        self, num_protected: int, num_in_use: int, num_wanted: int
    ) -> None:
        cache = manager(10)
        names = [f"x{number}" for number in range(num_protected)]
        keep(cache, *names, num_embeddings=1)
        for name in names:
            cache.protect(A, name)
        hold(cache, B, "z", num_in_use)
        assert not cache.try_begin(C, "large", num_wanted)
        cache.release(B, "z")
        assert cache.try_begin(C, "large", num_wanted)

    def test_what_is_claimed_ahead_leaves_protected_entries_their_room(self) -> None:
        cache = manager(4)
        cache.protect(A, "x")
        keep(cache, "x")
        assert cache.num_free_embeddings == 2
        assert not cache.try_begin(B, "y", 3, spares_protected=True)
        assert cache.try_begin(B, "y", 3)

    def test_half_of_the_budget_is_never_kept_by_protected_entries(self) -> None:
        cache = manager(6)
        for key in ("x", "y", "z"):
            cache.protect(A, key)
        keep(cache, "x", "y", "z")
        assert cache.num_free_embeddings == 3
        assert cache.try_begin(B, "new", 2, spares_protected=True)
        assert cache.take_evicted() == ("x",)
        assert cache.try_begin(B, "newer", 1, spares_protected=True)
        assert cache.take_evicted() == ("y",)
        assert not cache.try_begin(B, "newest", 2)

    def test_protection_lasts_until_its_last_user_ends_it(self) -> None:
        cache = manager(4)
        keep(cache, "x", "y")
        for user in (A, B):
            cache.protect(user, "x")
        cache.end_protection(A, "x")
        assert cache.try_begin(C, "new", 2)
        assert cache.take_evicted() == ("y",)
        for _ in range(2):
            cache.end_protection(B, "x")
        assert cache.try_begin(C, "newer", 1)
        assert cache.take_evicted() == ("x",)

    def test_a_protected_entry_that_was_forgotten_serves_only_those_for_whom_it_is_protected(self) -> None:
        cache = manager()
        keep(cache, "x", "y")
        cache.protect(A, "x")
        cache.forget()
        assert cache.take_evicted() == ("y",)
        assert [*cache.held_media()] == []
        assert not cache.can_find("x")
        assert not cache.try_use(B, "x")
        assert cache.try_use(A, "x")
        cache.release(A, "x")
        cache.end_protection(A, "x")
        assert cache.take_evicted() == ("x",)

    def test_a_new_entry_takes_the_place_of_a_forgotten_one_that_is_protected(self) -> None:
        cache = manager(4)
        cache.protect(A, "x")
        keep(cache, "x")
        hold(cache, A, "y")
        cache.forget()
        assert cache.try_begin(B, "x", 2)
        assert cache.take_evicted() == ("x",)
        assert cache.try_use(A, "x")

    def test_without_sharing_protected_entries_are_kept_and_dropped_with_their_protection(self) -> None:
        cache = manager(is_shared=False)
        cache.protect(A, "x")
        hold(cache, A, "x")
        cache.release(A, "x")
        assert cache.try_use(A, "x")
        cache.release(A, "x")
        cache.end_protection(A, "x")
        assert cache.take_evicted() == ("x",)

    def test_an_oversized_item_is_dropped_although_it_is_protected(self) -> None:
        cache = manager(1)
        cache.protect(A, "x")
        hold(cache, A, "x")
        cache.release(A, "x")
        cache.check_invariants()
        assert cache.num_entries == 0


SIZES = {"p": 1, "q": 1, "r": 2, "s": 3, "t": 4, "u": 9}
SEQUENCES = [("a", 0), ("a", 1), ("b", 0)]
USERS = [(sequence_id, item) for sequence_id in SEQUENCES for item in range(2)]


@dataclass
class Held:
    users: set[EncoderUser] = field(default_factory=set)
    is_ready: bool = False
    is_forgotten: bool = False


class EncoderMachine(RuleBasedStateMachine):
    """Users of few items in a small budget."""

    @initialize(num_embeddings=st.integers(0, 8), is_shared=st.sampled_from([True, True, True, False]))
    def begin(self, num_embeddings: int, is_shared: bool) -> None:
        self.cache = manager(num_embeddings, is_shared)
        self.budget = num_embeddings
        self.is_shared = is_shared
        self.entries: dict[str, Held] = {}
        self.idle: list[str] = []
        self.told: list[str] = []
        self.pinned: set[str] = set()
        self.protected: set[tuple[EncoderUser, str]] = set()
        self.num_evictions = 0

    def size_in_budget(self, keys: list[str]) -> int:
        return sum(SIZES[key] for key in keys if SIZES[key] <= self.budget)

    def waiting_users(self) -> list[EncoderUser]:
        used = {user for entry in self.entries.values() for user in entry.users}
        return [user for user in USERS if user not in used]

    @precondition(lambda self: self.waiting_users())
    @rule(data=st.data(), key=st.sampled_from(sorted(SIZES)))
    def ask(self, data: st.DataObject, key: str) -> None:
        user = data.draw(st.sampled_from(self.waiting_users()))
        entry = self.entries.get(key)
        is_there = entry is not None and (not entry.is_forgotten or (user, key) in self.protected)
        assert self.cache.try_use(user, key) == is_there
        if entry is not None and is_there:
            entry.users.add(user)
            self.idle = [other for other in self.idle if other != key]
        elif not is_there:
            spares = data.draw(st.booleans())
            self.expect_begun(self.cache.try_begin(user, key, SIZES[key], spares_protected=spares), user, key, spares)

    def is_protected(self, key: str) -> bool:
        return any(key == other for _, other in self.protected)

    def expect_begun(self, has_begun: bool, user: EncoderUser, key: str, spares_protected: bool) -> None:
        if key in self.idle:
            self.idle.remove(key)
            self.drop(key)
        if SIZES[key] > self.budget:
            can_begin = not any(SIZES[other] > self.budget for other in self.entries)
        else:
            busy = [other for other in self.entries if other not in self.idle]
            kept = [other for other in self.idle if self.is_protected(other)]
            num_fixed: float = self.size_in_budget(busy)
            num_kept = min(self.size_in_budget(kept), self.budget / 2)
            may_wait = num_fixed > 0 and num_kept + SIZES[key] <= self.budget
            if spares_protected or may_wait:
                num_fixed += num_kept
            can_begin = key not in self.entries and num_fixed + SIZES[key] <= self.budget
        assert has_begun == can_begin
        if not can_begin:
            return
        self.sort_idle()
        while SIZES[key] <= self.budget < self.size_in_budget(list(self.entries)) + SIZES[key]:
            self.drop(self.idle.pop(0))
            self.num_evictions += 1
        self.entries[key] = Held({user})

    def sort_idle(self) -> None:
        self.idle.sort(key=lambda key: 2 if self.is_protected(key) else key in self.pinned)

    def drop(self, key: str) -> None:
        del self.entries[key]
        self.told.append(key)
        self.pinned -= {key}

    def settle(self, key: str) -> None:
        """Keep or drop the entry after its last user has released it."""
        entry = self.entries[key]
        if entry.users or not entry.is_ready:
            return
        is_kept = self.is_protected(key) or (self.is_shared and not entry.is_forgotten)
        if is_kept and SIZES[key] <= self.budget:
            self.idle.append(key)
        else:
            self.drop(key)

    def being_encoded(self) -> list[str]:
        return sorted(key for key, entry in self.entries.items() if not entry.is_ready)

    @precondition(lambda self: self.being_encoded())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.being_encoded()))
        self.cache.finish(key)
        self.entries[key].is_ready = True
        self.settle(key)

    @precondition(lambda self: self.being_encoded())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.being_encoded()))
        assert self.cache.fail(key) == self.entries.pop(key).users
        self.pinned -= {key}

    @precondition(lambda self: len(self.waiting_users()) < len(USERS))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        waiting = self.waiting_users()
        user = data.draw(st.sampled_from([user for user in USERS if user not in waiting]))
        (key,) = (key for key, entry in self.entries.items() if user in entry.users)
        self.cache.release(user, key)
        self.entries[key].users.remove(user)
        self.settle(key)

    @rule(is_wanted=st.sampled_from([False, False, False, True]))
    def forget(self, is_wanted: bool) -> None:
        if is_wanted:
            self.cache.forget()
            self.sort_idle()
            self.pinned = set()
            while self.idle and not self.is_protected(self.idle[0]):
                self.drop(self.idle.pop(0))
            for entry in self.entries.values():
                entry.is_forgotten = True

    @rule(key=st.sampled_from(sorted(SIZES)))
    def pin(self, key: str) -> None:
        self.cache.pin(key, until=1)
        has_room = sum(SIZES[each] for each in self.pinned | {key}) * BYTES <= self.budget * BYTES // 2
        if not self.cache.can_find(key) or not self.is_shared or not has_room or key in self.pinned:
            return
        self.pinned |= {key}
        if key in self.idle and not self.is_protected(key):
            self.idle.remove(key)
            self.idle.insert(0, key)

    @rule(user=st.sampled_from(USERS), key=st.sampled_from(sorted(SIZES)), is_wanted=st.booleans())
    def protect(self, user: EncoderUser, key: str, is_wanted: bool) -> None:
        was_protected = self.is_protected(key)
        if is_wanted:
            self.cache.protect(user, key)
            self.protected.add((user, key))
        else:
            self.cache.end_protection(user, key)
            self.protected.discard((user, key))
        if key in self.idle and self.is_protected(key) != was_protected:
            self.idle.remove(key)
            self.settle(key)

    @rule()
    def tell(self) -> None:
        assert list(self.cache.take_evicted()) == self.told
        self.told = []

    @invariant()
    def the_manager_is_as_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        assert self.cache.num_bytes == self.size_in_budget(list(self.entries)) * BYTES
        assert self.cache.num_entries == len(self.entries)
        assert self.cache.num_evictions == self.num_evictions
        for key in SIZES:
            assert self.cache.is_ready(key) == (key in self.entries and self.entries[key].is_ready)
        uses = {(user, key) for key, entry in self.entries.items() for user in entry.users}
        assert set(self.cache.uses()) == uses
        assert set(self.cache.protections()) == self.protected


def test_the_manager_does_what_a_naive_model_does() -> None:
    run_state_machine_as_test(EncoderMachine, settings=thorough(100))
