"""Tests of the pool alone, then against a model that keeps plain lists."""

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

from keepsight.scheduling.block_hash import BYTES_PER_TOKEN, BlockName
from keepsight.scheduling.block_pool import BlockPool
from keepsight.scheduling.holdings import Holdings
from tests.scheduling.long_run import thorough


def named(block_hash: bytes, media: tuple[str, ...] = ()) -> BlockName:
    """All names follow the same block."""
    return BlockName(block_hash, b"parent", block_hash.rjust(2 * BYTES_PER_TOKEN), media)


def take(pool: BlockPool, num_blocks: int) -> list[int]:
    taken = pool.try_take(num_blocks)
    assert taken is not None
    return taken


def idle_pool(*release_order: int) -> BlockPool:
    """A pool whose blocks were each published under their own number and released in this order."""
    pool = BlockPool(len(release_order), Holdings())
    for block_id in take(pool, len(release_order)):
        pool.publish(block_id, named(b"%d" % block_id))
    pool.release(release_order)
    return pool


def test_a_new_pool_gives_all_its_blocks_in_a_row_and_no_more() -> None:
    pool = BlockPool(4, Holdings())
    assert take(pool, 4) == [0, 1, 2, 3]
    assert pool.try_take(1) is None


def test_taking_too_many_blocks_takes_none() -> None:
    pool = BlockPool(4, Holdings())
    take(pool, 3)
    assert pool.try_take(2) is None
    assert pool.num_free == 1


def test_taking_zero_blocks_always_works() -> None:
    pool = BlockPool(1, Holdings())
    take(pool, 1)
    assert pool.try_take(0) == []


def test_a_block_that_begins_with_another_token_is_not_alike() -> None:
    pool = BlockPool(1, Holdings())
    [block] = take(pool, 1)
    pool.publish(block, named(b"cat dog "))
    assert pool.find_alike(named(b"cat owl ")) == (1, block)
    assert pool.find_alike(named(b"owl dog ")) is None


def test_forgetting_twice_looks_at_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = idle_pool(1, 0)
    pool.forget_names()
    monkeypatch.setattr("keepsight.scheduling.block_pool.heapify", pytest.fail)
    pool.forget_names()
    assert take(pool, 2) == [0, 1]


def test_free_blocks_are_taken_before_those_that_can_be_found() -> None:
    pool = BlockPool(3, Holdings())
    first, second, third = take(pool, 3)
    pool.publish(first, named(b"first"))
    pool.release([first, second, third])
    take(pool, 2)
    assert pool.find(b"first") == first
    assert pool.num_evicted == 0


def test_the_least_recently_released_is_evicted_and_its_name_forgotten() -> None:
    pool = idle_pool(2, 0, 1)
    assert take(pool, 1) == [2]
    assert [pool.find(name) for name in (b"0", b"1", b"2")] == [0, 1, None]
    assert pool.num_evicted == 1


def test_blocks_evicted_together_come_in_the_order_of_their_ids() -> None:
    assert take(idle_pool(3, 2, 1, 0), 3) == [1, 2, 3]


def test_using_an_idle_block_saves_it_and_its_release_makes_it_the_youngest() -> None:
    pool = idle_pool(0, 1, 2)
    pool.use(0)
    assert pool.num_free == 2
    pool.release([0])
    assert take(pool, 2) == [1, 2]
    assert pool.find(b"0") == 0


def test_a_block_is_free_only_when_its_last_user_leaves() -> None:
    pool = idle_pool(0)
    pool.use(0)
    pool.use(0)
    pool.release([0])
    assert pool.try_take(1) is None
    pool.release([0])
    assert take(pool, 1) == [0]


def test_of_two_blocks_with_one_content_the_first_is_found_and_the_other_becomes_free() -> None:
    pool = BlockPool(2, Holdings())
    first, second = take(pool, 2)
    pool.publish(second, named(b"same"))
    pool.publish(first, named(b"same"))
    assert pool.find(b"same") == second
    pool.release([second, first])
    assert take(pool, 1) == [first]
    assert pool.num_evicted == 0


def test_publishing_again_changes_nothing() -> None:
    pool = BlockPool(1, Holdings())
    take(pool, 1)
    pool.publish(0, named(b"a"))
    pool.publish(0, named(b"a"))
    assert pool.find(b"a") == 0


def test_a_block_that_grows_is_found_by_its_last_name_alone() -> None:
    holdings = Holdings()
    pool = BlockPool(2, holdings)
    block, other = take(pool, 2)
    pool.publish(block, named(b"some", ("cat",)))
    pool.publish(block, named(b"more", ("cat", "dog")))
    assert [pool.find(name) for name in (b"some", b"more")] == [None, block]
    holdings.check_invariants(["cat", "dog"])
    pool.publish(other, named(b"all"))
    pool.publish(block, named(b"all"))
    assert [pool.find(name) for name in (b"more", b"all")] == [None, other]
    holdings.check_invariants([])
    pool.check_invariants()


def test_forgotten_names_are_not_found_and_those_in_use_stay_in_use() -> None:
    pool = idle_pool(0, 1)
    pool.use(1)
    pool.forget_names()
    assert pool.find(b"0") is pool.find(b"1") is None
    assert (pool.num_free, pool.num_users(1), pool.num_evicted) == (1, 1, 0)
    pool.release([1])
    pool.check_invariants()


def test_forgotten_blocks_are_taken_in_a_row_again() -> None:
    pool = idle_pool(3, 1, 2, 0)
    pool.forget_names()
    assert take(pool, 2) == [0, 1]


def test_pinned_blocks_are_evicted_after_all_others_but_before_a_request_is_refused() -> None:
    pool = idle_pool(0, 1, 2, 3)
    assert pool.pin(0, until=10)
    assert pool.pin(1, until=10)
    assert not pool.pin(2, until=10), "half of them are pinned"
    assert take(pool, 2) == [2, 3]
    assert take(pool, 1) == [1]
    assert [pool.find(name) for name in (b"0", b"1")] == [0, None]


def test_a_pin_ends_when_its_time_is_over_or_all_is_forgotten() -> None:
    pool = idle_pool(0, 1)
    pool.pin(0, until=10)
    pool.end_pins(10)
    assert take(pool, 1) == [1]
    pool.pin(0, until=20)
    pool.forget_names()
    pool.check_invariants()
    assert take(pool, 1) == [0]


def test_using_a_block_evicted_since_it_was_found_is_a_bug() -> None:
    pool = idle_pool(0)
    take(pool, 1)
    with pytest.raises(AssertionError, match="evicted since it was found"):
        pool.use(0)


def test_releasing_an_unused_block_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        BlockPool(1, Holdings()).release([0])


NAMES = [b"a", b"b", b"c", b"d", b"e", b"f"]


def test_media_are_held_while_any_block_in_which_they_lie_can_be_found() -> None:
    holdings = Holdings()
    pool = BlockPool(4, holdings)
    first, second, third, text = take(pool, 4)
    pool.publish(first, named(b"first", ("cat",)))
    pool.publish(first, named(b"first", ("cat",)))  # again: counted once
    pool.publish(second, named(b"second", ("cat", "dog")))
    pool.publish(third, named(b"second", ("cat", "dog")))  # not findable itself: its twin is
    pool.publish(text, named(b"text"))
    holdings.check_invariants(["cat", "cat", "dog"])
    pool.release([first, second, third, text])
    holdings.check_invariants(["cat", "cat", "dog"])
    take(pool, 3)
    assert "cat" not in holdings
    assert "dog" not in holdings
    pool.check_invariants()


def test_forgetting_also_drops_the_media_of_blocks_in_use() -> None:
    holdings = Holdings()
    pool = BlockPool(2, holdings)
    in_use, idle = take(pool, 2)
    pool.publish(in_use, named(b"a", ("cat",)))
    pool.publish(idle, named(b"b", ("dog",)))
    pool.release([idle])
    pool.forget_names()
    holdings.check_invariants([])
    pool.check_invariants()


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, Holdings())
        self.num_users = dict.fromkeys(range(num_blocks), 0)
        self.names: dict[int, bytes] = {}
        self.idle: list[int] = []
        self.pinned: set[int] = set()
        self.num_evicted = 0

    def in_use(self) -> list[int]:
        return [block_id for block_id, num_users in self.num_users.items() if num_users]

    @rule(num_blocks=st.integers(0, 5))
    def take(self, num_blocks: int) -> None:
        free = {block_id for block_id, num_users in self.num_users.items() if not num_users} - set(self.idle)
        taken = self.pool.try_take(num_blocks)
        if num_blocks > len(free) + len(self.idle):
            assert taken is None
            return
        num_evictions = max(0, num_blocks - len(free))
        assert taken is not None
        assert taken == sorted({*taken})
        self.idle.sort(key=self.pinned.__contains__)
        evicted, self.idle = self.idle[:num_evictions], self.idle[num_evictions:]
        self.pinned -= {*evicted}
        assert {*evicted} <= {*taken} <= free | {*evicted}
        assert len(taken) == num_blocks
        self.num_evicted += num_evictions
        for block_id in evicted:
            del self.names[block_id]
        for block_id in taken:
            self.num_users[block_id] = 1

    @rule(name=st.sampled_from(NAMES))
    def use(self, name: bytes) -> None:
        block_id = self.pool.find(name)
        if block_id is not None:
            self.pool.use(block_id)
            self.num_users[block_id] += 1
            self.idle = [other for other in self.idle if other != block_id]

    @precondition(lambda self: self.in_use())
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        block_id = data.draw(st.sampled_from(self.in_use()))
        self.pool.publish(block_id, named(name))
        if self.names.get(block_id) == name:
            return
        self.names.pop(block_id, None)
        if name not in self.names.values():
            self.names[block_id] = name

    @rule(name=st.sampled_from(NAMES))
    def pin(self, name: bytes) -> None:
        block_id = self.pool.find(name)
        if block_id is None:
            return
        has_room = len(self.pinned | {block_id}) <= len(self.num_users) // 2
        assert self.pool.pin(block_id, until=1) == (has_room or block_id in self.pinned)
        if has_room and block_id in self.idle and block_id not in self.pinned:
            self.idle.remove(block_id)
            self.idle.insert(0, block_id)
        self.pinned |= {block_id} if has_room else set()

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        released = data.draw(st.lists(st.sampled_from(self.in_use()), unique=True))
        self.pool.release(released)
        for block_id in released:
            self.num_users[block_id] -= 1
            if not self.num_users[block_id] and block_id in self.names:
                self.idle.append(block_id)

    @rule(is_wanted=st.sampled_from([False, False, False, True]))
    def forget(self, is_wanted: bool) -> None:
        if is_wanted:
            self.pool.forget_names()
            self.names, self.idle, self.pinned = {}, [], set()

    @invariant()
    def the_pool_is_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        found = {self.pool.find(name): name for name in NAMES}
        found.pop(None, None)
        assert found == self.names
        assert {block_id: self.pool.num_users(block_id) for block_id in self.num_users} == self.num_users
        assert self.pool.num_free == len(self.num_users) - len(self.in_use())
        assert self.pool.num_evicted == self.num_evicted


def test_the_pool_does_what_a_naive_model_does() -> None:
    run_state_machine_as_test(PoolMachine, settings=thorough(100))
