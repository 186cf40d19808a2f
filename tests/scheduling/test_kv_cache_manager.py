"""Lookup, waiting and holding: single cases, then a comparison with a model that keeps plain lists."""

from collections.abc import Callable
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

from keepsight.engine_config import KvCacheConfig
from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import EngineRequest
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.block_hash import BYTES_PER_TOKEN, BlockHasher, BlockName
from keepsight.scheduling.holdings import Holdings
from keepsight.scheduling.kv_cache_manager import NO_HIT, KvCacheManager, PrefixHit
from keepsight.scheduling.step_plan import KeptStretch, SequenceId, StateCopy
from tests.scheduling.long_run import thorough

BLOCK = 4
A, B, C = ("a", 0), ("b", 0), ("c", 0)


def manager(num_blocks: int = 8, enable_prefix_caching: bool = True, num_state_slots: int = 0) -> KvCacheManager:
    config = KvCacheConfig(
        num_blocks=num_blocks,
        block_size=BLOCK,
        enable_prefix_caching=enable_prefix_caching,
        num_state_slots=num_state_slots,
    )
    return KvCacheManager(config, Holdings())


def names(text: str) -> list[BlockName]:
    """Names of a sequence's blocks, one letter for the tokens of each: a block is named by all letters up to it."""
    return [
        BlockName(text[: end + 1].encode(), text[:end].encode(), b"".join(map(word, tokens(letter))))
        for end, letter in enumerate(text)
    ]


def hashes(text: str) -> list[bytes]:
    return [name.block_hash for name in names(text)]


def name_of(text: str) -> Callable[[int, int], BlockName]:
    """Return a function that names a block, or its first tokens only."""

    def name(block: int, num_tokens: int) -> BlockName:
        whole = names(text)[block]
        if num_tokens == BLOCK:
            return whole
        content = whole.content[: num_tokens * BYTES_PER_TOKEN]
        return BlockName(b"%b/%d" % (whole.block_hash, num_tokens), whole.parent, content)

    return name


def tokens(letter: str) -> str:
    """Blocks share their first token; the second depends on which half of the alphabet the letter is in."""
    return "." + ("-" if letter < "n" else "+") + letter * (BLOCK - 2)


def word(token: str) -> bytes:
    return ord(token).to_bytes(BYTES_PER_TOKEN, "little")


def compute(kv: KvCacheManager, sequence_id: SequenceId, text: str) -> None:
    """Begin a sequence, compute its full blocks and publish them."""
    num_tokens = len(text) * BLOCK
    hit = kv.find_prefix(hashes(text), num_tokens + 1)
    assert kv.try_extend(sequence_id, num_tokens, hit) is not None
    kv.publish(sequence_id, name_of(text), num_tokens)


class TestFinding:
    def test_nothing_is_found_before_it_is_computed(self) -> None:
        kv = manager()
        kv.try_extend(A, 8)
        kv.announce(A, hashes("xy"), 8)
        assert kv.find_prefix(hashes("xy"), 9).block_ids == ()

    def test_the_longest_common_beginning_is_found_while_in_use_and_after(self) -> None:
        kv = manager()
        compute(kv, A, "xyz")
        hit = PrefixHit((0, 1), 8)
        assert kv.find_prefix(hashes("xyw"), 12) == hit
        kv.release(A)
        assert kv.find_prefix(hashes("xyw"), 12) == hit

    @pytest.mark.parametrize(("num_tokens", "num_found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (100, 12)])
    def test_one_token_is_always_left_to_compute(self, num_tokens: int, num_found: int) -> None:
        kv = manager()
        compute(kv, A, "xyz")
        assert kv.find_prefix(hashes("xyz"), num_tokens).num_tokens == num_found

    def test_blocks_after_a_gap_are_not_found(self) -> None:
        kv = manager(num_blocks=3)
        compute(kv, A, "xy")
        assert kv.find_prefix(hashes("wy"), 9) == NO_HIT

    def test_only_full_blocks_can_be_found(self) -> None:
        kv = manager()
        kv.try_extend(A, 7)
        kv.publish(A, name_of("xy"), 7)
        assert kv.find_prefix(hashes("xy"), 9).num_tokens == 4

    def test_looking_changes_nothing(self) -> None:
        kv = manager(num_blocks=2)
        compute(kv, A, "x")
        kv.release(A)
        compute(kv, B, "y")
        kv.release(B)
        kv.find_prefix(hashes("x"), 5)
        kv.try_extend(C, 4)
        assert kv.find_prefix(hashes("x"), 5) == NO_HIT

    def test_without_prefix_caching_nothing_is_ever_found_or_waited_for(self) -> None:
        kv = manager(enable_prefix_caching=False)
        kv.try_extend(A, 8)
        kv.announce(A, hashes("xy"), 8)
        assert kv.find_prefix(hashes("xy"), 9) == NO_HIT
        kv.publish(A, name_of("xy"), 8)
        assert kv.find_prefix(hashes("xy"), 9) == NO_HIT
        kv.release(A)
        assert kv.pool.num_free == 8

    def test_a_hit_may_end_inside_a_picture_and_never_goes_on_with_another(self) -> None:
        def hasher(media_hash: str) -> BlockHasher:
            item = MediaItem(media_hash, TokenSpan(5, 8), Geometry(8, 8))
            return BlockHasher(EngineRequest("r", (7,) * 16, (item,), SamplingParams()), BLOCK)

        kv = manager()
        kv.try_extend(A, 16)
        kv.publish(A, hasher("first").name_of, 16)
        assert kv.find_prefix(hasher("first").hashes, 12).num_tokens == 8
        assert kv.find_prefix(hasher("other").hashes, 16).num_tokens == 4

    def test_the_tokens_in_common_with_the_next_block_are_found_too(self) -> None:
        kv = manager()
        compute(kv, A, "xyz")
        hit = kv.find_prefix(hashes("xyt"), 12)
        assert kv.reach_further(hit, names("xyt")[2], 12) == PrefixHit((0, 1), 10, alike=2)
        assert kv.reach_further(NO_HIT, names("a")[0], 4) == PrefixHit((), 1, alike=0)
        assert kv.reach_further(hit, names("xya")[2], 12) == PrefixHit((0, 1), 9, alike=2)
        assert kv.reach_further(hit, names("zzz")[2], 12) == hit, "nothing else follows the same"

    def test_the_block_with_most_tokens_in_common_is_found(self) -> None:
        kv = manager()
        for sequence_id, text in ((A, "a"), (B, "z"), (C, "b")):
            compute(kv, sequence_id, text)
        assert kv.reach_further(NO_HIT, names("t")[0], 4) == PrefixHit((), 2, alike=1)

    @pytest.mark.parametrize(("num_tokens", "num_found"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)])
    def test_one_token_of_an_alike_block_is_always_left_to_compute(self, num_tokens: int, num_found: int) -> None:
        kv = manager()
        compute(kv, A, "x")
        hit = kv.find_prefix(hashes("x"), num_tokens)
        further = kv.reach_further(hit, names("xx")[len(hit.block_ids)], num_tokens)
        assert further.num_tokens == num_found
        assert (further.alike is None) == (num_found == hit.num_tokens), "nothing is copied for no token"

    def test_the_rest_after_the_full_blocks_is_found_unless_another_block_has_all_of_it(self) -> None:
        kv = manager()
        for sequence_id, num_tokens in ((A, 6), (B, 5)):
            kv.try_extend(sequence_id, 8)
            kv.publish(sequence_id, name_of("xy"), num_tokens)
        assert kv.pool.num_findable == 2
        assert kv.reach_further(PrefixHit((0,), 4), names("xy")[1], 9) == PrefixHit((0,), 6, alike=1)
        kv.publish(A, name_of("xy"), 8)
        assert kv.pool.num_findable == 2, "it has grown, and is found whole"
        assert kv.find_prefix(hashes("xy"), 9) == PrefixHit((0, 1), 8)

    def test_an_alike_block_may_be_given_to_the_sequence_that_copies_it(self) -> None:
        kv = manager(num_blocks=2)
        compute(kv, A, "xy")
        kv.release(A)
        hit = kv.reach_further(kv.find_prefix(hashes("xz"), 8), names("xz")[1], 8)
        assert hit == PrefixHit((0,), 6, alike=1)
        assert kv.try_extend(B, 8, hit) == (0, 1)
        assert kv.reach_further(NO_HIT, names("xz")[1], 8) == NO_HIT, "it was evicted"

    def test_hits_are_counted_when_the_scheduler_says_so(self) -> None:
        kv = manager()
        kv.count(PrefixHit((0, 1), 8), 10)
        kv.count(NO_HIT, 3)
        assert (kv.num_queried_tokens, kv.num_hit_tokens) == (13, 8)


class TestWaiting:
    def under_way(self) -> KvCacheManager:
        kv = manager()
        kv.try_extend(A, 8)
        kv.announce(A, hashes("xy"), 8)
        return kv

    def test_a_block_that_another_sequence_computes_is_waited_for(self) -> None:
        kv = self.under_way()
        assert kv.find_prefix(hashes("xz"), 9) == PrefixHit(num_coming=4)
        assert kv.find_prefix(hashes("zx"), 9) == NO_HIT

    def test_a_block_that_would_not_be_used_is_not_waited_for(self) -> None:
        assert not self.under_way().find_prefix(hashes("x"), 4).num_coming

    def test_the_next_block_counts_and_no_later_one(self) -> None:
        kv = manager()
        compute(kv, A, "x")
        kv.try_extend(A, 12)
        kv.announce(A, hashes("xyz"), 12)
        assert kv.find_prefix(hashes("xy"), 9) == PrefixHit((0,), 4, num_coming=8)
        assert kv.find_prefix(hashes("xw"), 9) == PrefixHit((0,), 4)

    def test_one_that_waits_for_the_next_block_learns_where_it_begins(self) -> None:
        kv = manager()
        compute(kv, A, "x")
        kv.try_extend(A, 12)
        kv.announce(A, hashes("xyz"), 12)
        assert kv.find_coming(hashes("xyz"), 9) == 4
        assert kv.find_coming(hashes("xyz"), 8) is None, "the block would not be used"
        assert kv.find_coming(hashes("xwz"), 13) is None

    def test_once_computed_it_is_found(self) -> None:
        kv = self.under_way()
        kv.publish(A, name_of("xy"), 8)
        assert kv.find_prefix(hashes("xy"), 9) == PrefixHit((0, 1), 8)

    @pytest.mark.parametrize("end", ["withdraw", "release"])
    def test_a_block_that_will_not_come_is_not_waited_for(self, end: str) -> None:
        kv = self.under_way()
        getattr(kv, end)(A)
        assert kv.find_prefix(hashes("xy"), 9) == NO_HIT

    def test_two_may_announce_the_same_and_one_may_give_up(self) -> None:
        kv = self.under_way()
        kv.try_extend(B, 8)
        kv.announce(B, hashes("xy"), 8)
        kv.withdraw(A)
        assert kv.find_prefix(hashes("xy"), 9).num_coming
        kv.withdraw(B)
        assert not kv.find_prefix(hashes("xy"), 9).num_coming

    def test_two_may_compute_the_same_and_the_first_is_found(self) -> None:
        kv = self.under_way()
        kv.try_extend(B, 8)
        kv.announce(B, hashes("xy"), 8)
        kv.publish(B, name_of("xy"), 8)
        kv.publish(A, name_of("xy"), 8)
        assert kv.find_prefix(hashes("xy"), 9).block_ids == (2, 3)
        kv.check_invariants()

    def test_a_second_slice_under_way_is_a_bug(self) -> None:
        with pytest.raises(AssertionError, match="slice under way"):
            self.under_way().announce(A, hashes("xy"), 8)


class TestHolding:
    def test_a_table_grows_by_what_is_missing(self) -> None:
        kv = manager()
        assert kv.try_extend(A, 5) == (0, 1)
        assert kv.try_extend(A, 8) == ()
        assert kv.try_extend(A, 9) == (2,)
        assert kv.num_blocks_of(A) == 3
        assert kv.num_blocks_of(B) == 0

    def test_an_extension_that_does_not_fit_changes_nothing(self) -> None:
        kv = manager(num_blocks=3)
        kv.try_extend(A, 4)
        assert kv.try_extend(A, 17) is None
        assert kv.try_extend(B, 12) is None
        assert (kv.num_blocks_of(A), kv.num_blocks_of(B), kv.pool.num_free) == (1, 0, 2)

    def test_a_hit_is_used_before_fresh_blocks_are_taken(self) -> None:
        kv = manager(num_blocks=3)
        compute(kv, A, "xyz")
        kv.release(A)
        hit = kv.find_prefix(hashes("xy"), 9)
        assert kv.try_extend(B, 9, hit) == (0, 1, 2)
        assert kv.find_prefix(hashes("xyz"), 13) == PrefixHit((0, 1), 8)

    def test_a_refused_hit_keeps_its_place_in_the_order_of_eviction(self) -> None:
        kv = manager(num_blocks=2)
        compute(kv, A, "x")
        kv.release(A)
        compute(kv, B, "y")
        kv.release(B)
        assert kv.try_extend(C, 12, kv.find_prefix(hashes("x"), 12)) is None
        kv.try_extend(C, 4)
        assert kv.find_prefix(hashes("x"), 5) == NO_HIT
        assert kv.find_prefix(hashes("y"), 5).num_tokens == 4

    def test_a_hit_that_others_use_takes_no_room(self) -> None:
        kv = manager(num_blocks=3)
        compute(kv, A, "xy")
        assert kv.try_extend(B, 12, kv.find_prefix(hashes("xy"), 9)) == (0, 1, 2)
        assert kv.usage == 1
        kv.release(A)
        assert kv.pool.num_free == 0

    def test_the_end_of_a_released_sequence_is_evicted_before_its_beginning(self) -> None:
        kv = manager(num_blocks=3)
        compute(kv, A, "xyz")
        kv.release(A)
        kv.try_extend(B, 4)
        assert kv.find_prefix(hashes("xyz"), 13).num_tokens == 8
        assert kv.pool.num_evicted == 1

    def test_usage_counts_held_blocks_and_not_findable_ones(self) -> None:
        kv = manager(num_blocks=8)
        compute(kv, A, "xy")
        assert kv.usage == 0.25
        kv.release(A)
        assert kv.usage == 0

    def test_releasing_one_that_holds_nothing_changes_nothing(self) -> None:
        kv = manager()
        kv.release(A)
        assert kv.pool.num_free == 8

    def test_a_hit_for_a_sequence_that_has_blocks_is_a_bug(self) -> None:
        kv = manager()
        compute(kv, A, "x")
        with pytest.raises(AssertionError, match="has blocks already"):
            kv.try_extend(A, 8, PrefixHit((0,), 4))


class TestForgetting:
    def test_nothing_is_found_and_running_sequences_keep_their_blocks(self) -> None:
        kv = manager()
        compute(kv, A, "xy")
        compute(kv, B, "z")
        kv.release(B)
        kv.forget_prefixes()
        assert kv.find_prefix(hashes("xy"), 9) == kv.find_prefix(hashes("z"), 5) == NO_HIT
        assert (kv.num_blocks_of(A), kv.pool.num_free) == (2, 6)

    def test_a_sequence_from_before_shares_nothing_that_it_computes_later(self) -> None:
        kv = manager()
        kv.try_extend(A, 8)
        kv.announce(A, hashes("xy"), 8)
        kv.forget_prefixes()
        assert kv.find_prefix(hashes("xy"), 9) == NO_HIT
        kv.publish(A, name_of("xy"), 6)
        assert kv.reach_further(NO_HIT, names("xy")[0], 9) == NO_HIT, "nor the beginning of a block"
        kv.publish(A, name_of("xy"), 8)
        kv.announce(A, hashes("xy"), 8)
        assert kv.find_prefix(hashes("xy"), 9) == NO_HIT
        assert kv.pool.num_findable == 0
        kv.check_invariants()

    def test_once_it_begins_again_it_shares_as_others_do(self) -> None:
        kv = manager()
        compute(kv, A, "xy")
        kv.forget_prefixes()
        kv.release(A)
        compute(kv, A, "xy")
        assert kv.find_prefix(hashes("xy"), 9).num_tokens == 8


class TestAdopting:
    def test_adopted_blocks_are_found_and_the_last_is_evicted_first(self) -> None:
        kv = manager(4)
        assert kv.adopt(names("xyz"), 0) == [(0, 0), (1, 1), (2, 2)]
        assert kv.find_prefix(hashes("xyz"), 13).block_ids == (0, 1, 2)
        compute(kv, A, "ab")
        assert kv.find_prefix(hashes("xyz"), 13).block_ids == (0, 1)

    def test_held_blocks_are_not_adopted_again_and_not_evicted_for_others(self) -> None:
        kv = manager(4)
        compute(kv, A, "xy")
        kv.release(A)
        compute(kv, B, "b")
        assert [index for _, index in kv.adopt(names("xyz"), 0)] == [2]
        assert kv.find_prefix(hashes("xyz"), 13).num_tokens == 12

    def test_blocks_that_follow_no_held_block_are_not_adopted(self) -> None:
        kv = manager(4)
        assert kv.adopt(names("xyz")[1:], 1) == []
        assert kv.pool.num_findable == 0

    def test_as_much_is_adopted_as_there_is_room_for(self) -> None:
        kv = manager(3)
        compute(kv, A, "a")
        assert kv.adopt(names("xyz"), 0) == [(1, 0), (2, 1)]
        assert kv.find_prefix(hashes("xyz"), 13).num_tokens == 8


class TestStretches:
    def stretched(self) -> KvCacheManager:
        return KvCacheManager(KvCacheConfig(num_blocks=8, block_size=BLOCK, blocks_per_stretch=2), Holdings())

    def test_a_stretch_is_reported_once_when_its_last_block_can_be_found(self) -> None:
        kv = self.stretched()
        kv.try_extend(A, 5 * BLOCK)
        kv.publish(A, name_of("vwxyz"), 3 * BLOCK + 1)
        assert kv.take_to_keep() == [KeptStretch(b"vw", (0, 1))]
        kv.publish(A, name_of("vwxyz"), 5 * BLOCK)
        assert kv.take_to_keep() == [KeptStretch(b"vwxy", (2, 3), behind=(b"vw",))]
        assert kv.take_to_keep() == []

    def test_a_stretch_names_all_before_it_and_those_that_were_found(self) -> None:
        kv = KvCacheManager(KvCacheConfig(num_blocks=8, block_size=BLOCK, blocks_per_stretch=1), Holdings())
        compute(kv, A, "vw")
        assert kv.take_to_keep() == [KeptStretch(b"v", (0,)), KeptStretch(b"vw", (1,), behind=(b"v",))]
        compute(kv, B, "vwx")
        assert kv.take_to_keep() == [KeptStretch(b"vwx", (2,), behind=(b"v", b"vw"))]

    def test_a_stretch_that_begins_in_found_blocks_is_whole(self) -> None:
        kv = self.stretched()
        compute(kv, A, "v")
        compute(kv, B, "vwx")
        assert kv.take_to_keep() == [KeptStretch(b"vw", (0, 1))]

    def test_found_or_adopted_stretches_are_not_reported_again(self) -> None:
        kv = self.stretched()
        kv.adopt(names("vwxy"), 0)
        compute(kv, A, "vwxy")
        assert kv.take_to_keep() == []

    def test_forgotten_stretches_are_not_reported(self) -> None:
        kv = self.stretched()
        compute(kv, A, "vw")
        kv.forget_prefixes()
        assert kv.take_to_keep() == []


def keep_state(kv: KvCacheManager, sequence_id: SequenceId, block_hash: bytes) -> None:
    kv.promise_state(sequence_id, block_hash)
    kv.keep_state(sequence_id, block_hash)


class TestRecurrentLayers:
    def test_a_prefix_is_found_up_to_the_last_kept_state(self) -> None:
        kv = manager(num_state_slots=3)
        compute(kv, A, "x")
        keep_state(kv, A, b"x")
        kv.try_extend(A, 12)
        kv.publish(A, name_of("xyz"), 12)
        assert kv.find_prefix(hashes("xyz"), 13) == PrefixHit((0,), 4, num_common=12)
        keep_state(kv, A, b"xyz")
        assert kv.find_prefix(hashes("xyz"), 13) == PrefixHit((0, 1, 2), 12, num_common=12)
        assert kv.find_prefix(hashes("xyz"), 12) == PrefixHit((0,), 4, num_common=8)
        kv.check_invariants()

    def test_a_state_whose_block_is_gone_is_not_found_until_the_block_is_computed_again(self) -> None:
        kv = manager(num_blocks=2, num_state_slots=3)
        compute(kv, A, "x")
        keep_state(kv, A, b"x")
        kv.release(A)
        compute(kv, B, "zz")
        assert kv.find_prefix(hashes("xy"), 8) == NO_HIT
        kv.release(B)
        compute(kv, C, "x")
        assert kv.find_prefix(hashes("xy"), 8).num_tokens == 4

    def test_a_sequence_begins_with_a_copy_of_the_kept_state(self) -> None:
        kv = manager(num_state_slots=3)
        compute(kv, A, "x")
        keep_state(kv, A, b"x")
        kv.try_extend(B, 8, kv.find_prefix(hashes("xy"), 8))
        first, second = kv.slots.slot_of(A), kv.slots.slot_of(B)
        assert second is not None
        [kept] = {0, 1, 2} - {first, second}
        assert kv.slots.take_copies() == [StateCopy(kept, second)]

    def test_no_slot_is_taken_for_a_hit_whose_last_block_is_gone(self) -> None:
        kv = manager(num_blocks=2, num_state_slots=3)
        compute(kv, A, "x")
        keep_state(kv, A, b"x")
        kv.release(A)
        hit = kv.find_prefix(hashes("xy"), 8)
        kv.try_extend(B, 8)
        kv.release(B)
        with pytest.raises(AssertionError, match="evicted since it was found"):
            kv.try_extend(C, 8, hit)
        assert kv.slots.slot_of(C) is None

    def test_without_a_slot_no_sequence_begins_and_nothing_changes(self) -> None:
        kv = manager(num_state_slots=1)
        assert kv.try_extend(A, 4) is not None
        assert kv.try_extend(B, 4) is None
        assert kv.pool.num_free == 7
        kv.check_invariants()
        kv.release(A)
        assert kv.try_extend(B, 4) is not None
        assert kv.try_extend(B, 8) is not None

    def test_without_a_block_no_slot_is_taken(self) -> None:
        kv = manager(num_blocks=1, num_state_slots=2)
        assert kv.try_extend(A, 8) is None
        assert kv.slots.slot_of(A) is None

    def test_no_part_of_a_block_is_copied(self) -> None:
        kv = manager(num_state_slots=2)
        kv.try_extend(A, 7)
        kv.publish(A, name_of("xy"), 7)
        kv.release(A)
        assert kv.reach_further(NO_HIT, names("x")[0], 9) == NO_HIT
        assert kv.pool.num_findable == 1

    def test_what_is_being_computed_belongs_to_the_common_beginning(self) -> None:
        kv = manager(num_state_slots=3)
        kv.try_extend(A, 14)
        kv.announce(A, hashes("xyz"), 14)
        assert kv.announced_by(hashes("xyzw")) == kv.announced_by(hashes("xyzw")[1:]) == [(A, 14)]
        assert kv.announced_by(hashes("w")) == []
        assert kv.find_prefix(hashes("xyzw"), 16) == PrefixHit(num_coming=12, num_common=12)
        assert kv.find_prefix(hashes("xyw"), 16) == PrefixHit(num_coming=8, num_common=8)
        assert kv.find_coming(hashes("xyzw"), 16) is None, "nobody waits for blocks without a state"
        kv.withdraw(A)
        assert kv.announced_by(hashes("xyzw")) == []
        assert kv.find_prefix(hashes("xyzw"), 16) == NO_HIT

    def test_what_is_forgotten_is_not_found_and_what_began_before_keeps_nothing(self) -> None:
        kv = manager(num_state_slots=3)
        compute(kv, A, "xy")
        keep_state(kv, A, b"x")
        kv.promise_state(A, b"xy")
        kv.forget_prefixes()
        assert kv.slots.num_kept == 0
        kv.keep_state(A, b"xy")
        assert kv.slots.num_kept == 0
        assert not kv.slots.will_have(A, b"xy"), "its slot is free again"
        assert kv.promise_state(A, b"x") is None
        compute(kv, B, "x")
        assert kv.find_prefix(hashes("xy"), 8).num_tokens == 0
        kv.check_invariants()

    def test_pinned_states_are_evicted_last_until_their_time(self) -> None:
        kv = manager(num_state_slots=4)
        compute(kv, A, "x")
        keep_state(kv, A, b"x")
        kv.pin_prefix(hashes("x"), 4, until=10.0)
        for text in ("y", "z", "v"):
            compute(kv, B, text)
            keep_state(kv, B, text.encode())
            kv.release(B)
        assert kv.find_prefix(hashes("xy"), 8).num_tokens == 4
        assert kv.find_prefix(hashes("yy"), 8).num_tokens == 0
        kv.end_pins(10.0)
        for text in ("y", "z"):
            compute(kv, B, text)
            keep_state(kv, B, text.encode())
            kv.release(B)
        assert kv.find_prefix(hashes("xy"), 8).num_tokens == 0

    def test_of_a_prompt_whose_blocks_are_not_all_held_those_before_the_first_missing_one_are_pinned(self) -> None:
        kv = manager()
        compute(kv, A, "xy")
        kv.pin_prefix(hashes("xzy"), 12, until=10.0)
        assert kv.pool.num_pinned == 1


@dataclass
class Running:
    """A sequence of the model."""

    text: str
    num_computed: int
    block_ids: list[int]
    end: int | None = None  # end of the slice in progress
    is_of_old: bool = False
    announced: list[bytes] = field(default_factory=list)


def _num_alike(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


TEXTS = ["aaaaa", "aaabb", "aabbz", "abbzz", "bbbbb", "bzbab"]


class KvMachine(RuleBasedStateMachine):
    """Sequences with common beginnings in too few blocks."""

    @initialize(num_blocks=st.integers(3, 10))
    def begin(self, num_blocks: int) -> None:
        self.kv = manager(num_blocks)
        self.num_blocks = num_blocks
        self.running: dict[SequenceId, Running] = {}
        self.block_of: dict[bytes, int] = {}
        self.idle: list[int] = []
        self.num_evicted = 0
        self.next_id = 0

    def in_use(self) -> set[int]:
        return {block_id for sequence in self.running.values() for block_id in sequence.block_ids}

    def expected_hit(self, text: str, num_tokens: int) -> PrefixHit:
        found: list[int] = []
        for block_hash in hashes(text)[: (num_tokens - 1) // BLOCK]:
            if block_hash not in self.block_of:
                is_coming = any(block_hash in sequence.announced for sequence in self.running.values())
                return PrefixHit(tuple(found), len(found) * BLOCK, (len(found) + 1) * BLOCK if is_coming else 0)
            found.append(self.block_of[block_hash])
        return PrefixHit(tuple(found), len(found) * BLOCK)

    def expect_reach(self, hit: PrefixHit, text: str, num_tokens: int) -> PrefixHit:
        """Extend the hit by the tokens that the next block has in common with any findable block after the same one."""
        further = self.kv.reach_further(hit, names(text)[len(hit.block_ids)], num_tokens)
        siblings = self.num_alike(text[: len(hit.block_ids) + 1])
        most = min(max(siblings.values(), default=0), num_tokens - 1 - hit.num_tokens)
        assert further.num_tokens == hit.num_tokens + most
        assert (further.alike is None) == (most == 0)
        if further.alike is not None:
            assert siblings[further.alike] == max(siblings.values())
        return further

    def num_alike(self, text: str) -> dict[int, int]:
        """Return how many tokens of the last block each other block after the same one has in common with it."""
        alike: dict[int, int] = {}
        for block_hash, block_id in self.block_of.items():
            other, _, num_tokens = block_hash.decode().partition("/")
            if other[:-1] == text[:-1]:
                alike[block_id] = _num_alike(tokens(text[-1]), tokens(other[-1])[: int(num_tokens or BLOCK)])
        return alike

    def take_name(self, block_id: int) -> None:
        self.block_of = {name: other for name, other in self.block_of.items() if other != block_id}

    def expect_taken(self, num_fresh: int, hit: PrefixHit, added: tuple[int, ...] | None) -> bool:
        """The hit's blocks stop being idle; then the oldest idle blocks are evicted if none are free."""
        idle = [block_id for block_id in self.idle if block_id not in hit.block_ids]
        num_free = self.num_blocks - len(self.in_use() | {*self.idle})
        if num_fresh > num_free + len(idle):
            assert added is None
            return False
        assert added is not None
        evicted = idle[: max(0, num_fresh - num_free)]
        fresh = added[len(hit.block_ids) :]
        assert added[: len(hit.block_ids)] == hit.block_ids
        assert len(fresh) == num_fresh
        assert {*evicted} <= {*fresh}
        assert not {*fresh} & (self.in_use() | {*idle[len(evicted) :]})
        self.idle = idle[len(evicted) :]
        self.num_evicted += len(evicted)
        self.block_of = {name: block_id for name, block_id in self.block_of.items() if block_id not in evicted}
        return True

    @rule(text=st.sampled_from(TEXTS), num_tokens=st.integers(1, 5 * BLOCK), looks=st.sampled_from([True, True, False]))
    def admit(self, text: str, num_tokens: int, looks: bool) -> None:
        hit = NO_HIT
        if looks:
            hit = self.expect_reach(self.kv.find_prefix(hashes(text), num_tokens), text, num_tokens)
        sequence_id = ("sequence", self.next_id)
        self.next_id += 1
        added = self.kv.try_extend(sequence_id, num_tokens, hit)
        if self.expect_taken(-(-num_tokens // BLOCK) - len(hit.block_ids), hit, added):
            assert added is not None
            self.running[sequence_id] = Running(text, hit.num_tokens, list(added))

    def some_running(self, data: st.DataObject) -> SequenceId:
        return data.draw(st.sampled_from(sorted(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 5 * BLOCK))
    def extend(self, data: st.DataObject, num_tokens: int) -> None:
        sequence_id = self.some_running(data)
        block_ids = self.running[sequence_id].block_ids
        num_missing = max(0, -(-num_tokens // BLOCK) - len(block_ids))
        added = self.kv.try_extend(sequence_id, num_tokens)
        if self.expect_taken(num_missing, NO_HIT, added):
            assert added is not None
            block_ids += added

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.integers(1, 3 * BLOCK))
    def start_slice(self, data: st.DataObject, length: int) -> None:
        sequence_id = self.some_running(data)
        sequence = self.running[sequence_id]
        end = min(sequence.num_computed + length, len(sequence.block_ids) * BLOCK)
        if sequence.end is None and end > sequence.num_computed:
            self.kv.announce(sequence_id, hashes(sequence.text), end)
            sequence.end = end
            if not sequence.is_of_old:
                sequence.announced = hashes(sequence.text)[sequence.num_computed // BLOCK : end // BLOCK]

    @precondition(lambda self: any(sequence.end for sequence in self.running.values()))
    @rule(data=st.data(), is_computed=st.sampled_from([True, True, False]))
    def end_slice(self, data: st.DataObject, is_computed: bool) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(key for key, value in self.running.items() if value.end)))
        sequence = self.running[sequence_id]
        end, sequence.end, sequence.announced = sequence.end, None, []
        assert end is not None
        if not is_computed:
            self.kv.withdraw(sequence_id)
            return
        self.kv.publish(sequence_id, name_of(sequence.text), end)
        if not sequence.is_of_old:
            for index in range(sequence.num_computed // BLOCK, end // BLOCK):
                self.take_name(sequence.block_ids[index])
                self.block_of.setdefault(hashes(sequence.text)[index], sequence.block_ids[index])
        sequence.num_computed = end
        self.expect_copyable(sequence)

    def expect_copyable(self, sequence: Running) -> None:
        block, num_tokens = divmod(sequence.num_computed, BLOCK)
        if sequence.is_of_old or not num_tokens:
            return
        if num_tokens > max(self.num_alike(sequence.text[: block + 1]).values(), default=0):
            self.take_name(sequence.block_ids[block])
            self.block_of[name_of(sequence.text)(block, num_tokens).block_hash] = sequence.block_ids[block]

    @precondition(lambda self: any(not sequence.end for sequence in self.running.values()))
    @rule(data=st.data())
    def publish_again(self, data: st.DataObject) -> None:
        """As happens before preemption; others that held as much of it may have gone meanwhile."""
        sequence_id = data.draw(st.sampled_from(sorted(key for key, value in self.running.items() if not value.end)))
        sequence = self.running[sequence_id]
        self.kv.publish(sequence_id, name_of(sequence.text), sequence.num_computed)
        self.expect_copyable(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence_id = self.some_running(data)
        self.kv.release(sequence_id)
        block_ids = self.running.pop(sequence_id).block_ids
        left = [block_id for block_id in reversed(block_ids) if block_id not in self.in_use()]
        self.idle += [block_id for block_id in left if block_id in self.block_of.values()]

    @rule(text=st.sampled_from(TEXTS), first=st.integers(0, 4), length=st.integers(1, 5))
    def adopt(self, text: str, first: int, length: int) -> None:
        row = names(text)[first : first + length]
        adopted = {index: block_id for block_id, index in self.kv.adopt(row, first)}
        held: list[int] = []
        for index, name in enumerate(row, first):
            if name.block_hash not in self.block_of:
                follows = index == 0 or name.parent in self.block_of
                if not (follows and self.expect_adopted(adopted.pop(index, None), held)):
                    break
                self.block_of[name.block_hash] = held[-1]
            else:
                held.append(self.block_of[name.block_hash])
        assert not adopted
        others = [block_id for block_id in self.idle if block_id not in held]
        self.idle = others + [block_id for block_id in reversed(held) if block_id not in self.in_use()]

    def expect_adopted(self, block_id: int | None, held: list[int]) -> bool:
        """Expect a free block, or the oldest idle one that is not in `held`."""
        others = [each for each in self.idle if each not in held]
        if len(self.in_use() | {*self.idle, *held}) == self.num_blocks:
            if not others:
                assert block_id is None
                return False
            assert block_id == others[0]
            self.idle.remove(block_id)
            self.take_name(block_id)
            self.num_evicted += 1
        assert block_id is not None
        assert block_id not in self.in_use() | {*self.idle, *held}
        held.append(block_id)
        return True

    @rule(is_wanted=st.sampled_from([False, False, False, True]))
    def forget(self, is_wanted: bool) -> None:
        if is_wanted:
            self.kv.forget_prefixes()
            self.block_of, self.idle = {}, []
            for sequence in self.running.values():
                sequence.is_of_old, sequence.announced = True, []

    @invariant()
    def the_manager_is_as_the_model(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        for text in TEXTS:
            for num_tokens in (len(text) * BLOCK, len(text) * BLOCK + 1):
                assert self.kv.find_prefix(hashes(text), num_tokens) == self.expected_hit(text, num_tokens)
        assert self.kv.pool.num_free == self.num_blocks - len(self.in_use())
        assert self.kv.pool.num_evicted == self.num_evicted
        for sequence_id, sequence in self.running.items():
            assert self.kv.num_blocks_of(sequence_id) == len(sequence.block_ids)


def test_the_manager_does_what_a_naive_model_does() -> None:
    run_state_machine_as_test(KvMachine, settings=thorough(60))
