"""Prompts known to the engine: a beginning that need not be computed, and an end from which an answer can begin."""

from dataclasses import replace
from typing import Any

import pytest

from keepsight.requests import ResetCaches
from keepsight.scheduling.request_state import ParkedFor
from tests.scheduling.drive import Drive, adapter, lengths, make_config, make_request, with_text

# The same prompt again -----------------------------------------------------------------------------------------


def test_the_same_prompt_has_its_first_token_before_anything_is_computed() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 5))
    plans = drive.run(make_request("again", 8, "cat", 5, max_tokens=3))
    assert [len(plan.recall) for plan in plans] == [1, 0, 0]
    # For the answer: the prompt's last three tokens fill no block, but begin one that the first answer filled.
    assert lengths(plans) == [[], [1], [1]]
    assert drive.cached["again", 0] == 18
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_first_token_is_sampled_once_even_if_others_rejoin_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8))
    drive.runner.set_pace(lambda: False)
    drive.add(make_request("picture", "cat", 3))
    drive.step()
    drive.step()
    drive.add(make_request("again", 8))
    drive.add(make_request("takes pages", 9, cache_salt="its own"))
    lineup, try_extend = drive.scheduler.lineup, drive.scheduler.kv_cache.try_extend
    [parked] = lineup.parked_for(ParkedFor.ENCODER)

    def unpark_and_extend(*args: Any) -> tuple[int, ...] | None:
        if parked in lineup.parked:
            lineup.unpark(parked)
        return try_extend(*args)

    monkeypatch.setattr(drive.scheduler.kv_cache, "try_extend", unpark_and_extend)
    assert [recall.sequence_id[0] for recall in drive.step().recall] == ["again"]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_an_answer_of_one_token_to_the_same_prompt_computes_nothing() -> None:
    drive = Drive(make_config(max_num_seqs=1))
    drive.run(make_request("first", 3))
    num_computed = drive.runner.num_computed_tokens
    plans = drive.run(*(make_request(str(number), 3, max_tokens=1, seed=number) for number in range(5)))
    assert len(plans) == 1
    assert drive.runner.num_computed_tokens == num_computed
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_known_prompt_waits_until_there_is_a_seat() -> None:
    drive = Drive(make_config(max_num_seqs=1))
    drive.run(make_request("first", 8, "cat", 6))
    drive.run(make_request("long", 5, max_tokens=20), make_request("again", 8, "cat", 6))
    recalls = [index for index, plan in enumerate(drive.runner.plans) if plan.recall]
    assert drive.runner.plans[recalls[0]].now == []
    drive.expect_right_answers()


def test_the_end_of_a_prompt_whose_blocks_are_gone_is_not_enough() -> None:
    drive = Drive(make_config(num_blocks=8))
    drive.run(make_request("first", 20))
    drive.run(with_text(make_request("other", 28), [9] * 28))
    plans = drive.run(make_request("again", 20))
    assert not any(plan.recall for plan in plans)
    drive.expect_right_answers()


# With 32, no block is full and only the end can be found.
@pytest.mark.parametrize("block_size", [4, 32])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_ends_of_prompts_begun_before_all_was_forgotten_are_not_found(num_steps: int, block_size: int) -> None:
    drive = Drive(make_config(max_num_batched_tokens=14, block_size=block_size))
    drive.add(make_request("first", 30))
    for _ in range(num_steps):
        drive.step()
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.run()
    plans = drive.run(make_request("again", 30))
    assert any(plan.recall for plan in plans) == (num_steps == 0)
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_the_runner_keeps_no_more_ends_than_it_is_told_to() -> None:
    drive = Drive(make_config(max_prompt_ends=2))
    for number in (3, 5, 7, 3, 9):
        drive.run(make_request(f"{number}, the {len(drive.requests)}th", number))
    assert len(drive.runner.ends) == 2
    assert not any(plan.recall for plan in drive.run(make_request("gone", 5)))
    assert any(plan.recall for plan in drive.run(make_request("kept", 9)))


def test_a_first_token_that_cannot_be_drawn_fails_its_request_and_no_other() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 6))
    drive.runner.bad_requests.add("bad")
    drive.run(make_request("bad", 8, "cat", 6), make_request("good", 8, "cat", 6))
    assert drive.failed["bad"].message == "a bad request"
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_prompt_logprobs_make_the_whole_prompt_be_computed_and_no_cache_be_asked() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 5))
    num_queried = drive.scheduler.kv_cache.num_queried_tokens
    drive.run(make_request("told", 8, "cat", 5, prompt_logprobs=0))
    assert drive.cached["told", 0] == 0
    assert drive.scheduler.kv_cache.num_queried_tokens == num_queried
    drive.expect_right_answers()


def test_the_beginning_of_a_prompt_is_found_for_its_vector_and_its_end_is_not() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 6))
    plans = drive.run(make_request("vector", 8, "cat", 6, max_tokens=1, wants_vector=True))
    assert drive.cached["vector", 0] > 8
    assert not any(plan.recall for plan in plans)
    drive.expect_right_answers()


def test_no_end_is_kept_of_a_prompt_whose_vector_is_wanted() -> None:
    drive = Drive(make_config())
    drive.run(make_request("vector", 9, max_tokens=1, wants_vector=True))
    assert not any(plan.recall for plan in drive.run(make_request("later", 9)))
    drive.expect_right_answers()


# What makes prefixes differ -----------------------------------------------------------------------------------


def test_two_pictures_in_another_order_are_another_prompt() -> None:
    drive = Drive(make_config())
    drive.run(make_request("ab", 4, "cat", "dog", 4), make_request("ba", 4, "dog", "cat", 4))
    assert drive.cached["ba", 0] == 4
    assert sorted(drive.runner.encoded) == ["cat", "dog"]
    drive.expect_right_answers()


@pytest.mark.parametrize("text_before", range(1, 17))
def test_a_hit_may_end_inside_a_picture_wherever_it_begins(text_before: int) -> None:
    drive = Drive(make_config(block_size=8))
    drive.run(make_request("first", text_before, "cat", 5))
    num_left = (text_before + 5) // 8
    evict_all_but(num_left, drive)
    drive.run(make_request("again", text_before, "cat", 1))
    assert drive.cached["again", 0] == num_left * 8
    assert drive.runner.encoded == ["cat"]
    drive.expect_right_answers()


def test_a_request_whose_hit_ends_in_a_missing_picture_is_parked_until_it_comes() -> None:
    drive = Drive(make_config(block_size=8))
    drive.run(make_request("first", 5, "cat", 5))
    evict_all_but(1, drive)
    drive.scheduler.reset(prefix=False, encoder=True)
    drive.delivers = False
    drive.add(make_request("again", 5, "cat", 1))
    drive.step()
    assert [state.parked_for for state in drive.scheduler.lineup.parked] == [ParkedFor.PIXELS]
    drive.deliver("cat")
    drive.expect_all_answered()


def evict_all_but(num_blocks: int, drive: Drive) -> None:
    """Evict blocks, the last of a prompt first."""
    pool = drive.scheduler.kv_cache.pool
    taken = pool.try_take(pool.num_blocks - num_blocks)
    assert taken is not None
    pool.release(taken)
    assert pool.num_findable == num_blocks


@pytest.mark.parametrize("text_before", range(8))
@pytest.mark.parametrize("text_alike", range(4))
def test_a_hit_continues_after_a_picture_to_the_first_different_word(text_before: int, text_alike: int) -> None:
    drive = Drive(make_config(block_size=8, num_pictures=1))
    drive.run(with_text(make_request("first", text_before, "cat", 20), [9] * (text_before + 20)))
    drive.run(make_request("evicts its embeddings", "dog", 1))
    words = [9] * (text_before + text_alike) + [8] * 9
    drive.run(with_text(make_request("again", text_before, "cat", text_alike + 9), words))
    assert drive.cached["again", 0] == text_before + 6 + text_alike
    assert drive.runner.encoded == ["cat", "dog"]
    drive.expect_right_answers()


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_a_conversation_goes_on_from_the_last_token_that_was_computed(num_tokens: int) -> None:
    drive = Drive(make_config(block_size=8))
    drive.run(first := make_request("first", 3, "cat", 4, max_tokens=num_tokens, ignore_eos=True))
    conversation = (*first.token_ids, *drive.tokens["first", 0])
    drive.run(replace(first, request_id="second", token_ids=(*conversation, 11, 12)))
    # The answer's last token was sampled but not computed.
    assert drive.cached["second", 0] == len(conversation) - 1
    drive.expect_right_answers()


def test_a_request_that_waited_for_a_picture_continues_where_it_was() -> None:
    drive = Drive(make_config(caches_prefixes=False), delivers=False)
    drive.add(make_request("a", 40, "cat", 3, max_tokens=1))
    drive.step()
    drive.step()
    drive.deliver("cat")
    drive.expect_all_answered()
    assert drive.runner.num_computed_tokens == 49


def test_a_request_that_waited_for_a_picture_finds_blocks_computed_meanwhile() -> None:
    drive = Drive(make_config(max_num_batched_tokens=40), delivers=False)
    drive.add(make_request("a", 60, "cat", 3, max_tokens=1))
    drive.step()
    drive.step()
    drive.add(make_request("b", 60, "cat", 3, max_tokens=1, priority=-1))
    drive.step()
    drive.deliver("cat")
    drive.expect_all_answered()
    assert drive.runner.num_computed_tokens == 69


def test_an_aborted_request_leaves_what_was_computed() -> None:
    drive = Drive(make_config(max_num_batched_tokens=14))
    drive.add(make_request("first", 23))
    drive.step()
    drive.scheduler.abort("first")
    drive.run(make_request("again", 23))
    assert drive.cached["again", 0] == 14
    drive.expect_right_answers()


def test_a_block_that_another_holds_in_full_is_not_held_twice() -> None:
    drive = Drive(make_config())
    for name in ("first", "again"):
        drive.run(make_request(name, 9, max_tokens=1))
        assert drive.scheduler.kv_cache.pool.num_findable == 3


def test_a_page_is_copied_before_it_is_given_away_in_the_same_step() -> None:
    drive = Drive(make_config(num_blocks=4, max_prompt_ends=0))
    drive.run(with_text(make_request("first", 7, max_tokens=2), [9] * 7))
    drive.add(with_text(make_request("alike", 8, max_tokens=1), [9] * 7 + [8]))
    drive.add(with_text(make_request("another", 8, max_tokens=1), [5] * 8))
    plan = drive.step()
    [copied] = plan.copy
    assert [copied.source in piece.new_block_ids for piece in plan.now] == [False, True]
    drive.expect_all_answered()


def test_a_salt_or_another_version_of_an_adapter_shares_nothing() -> None:
    drive = Drive(make_config())
    drive.run(make_request("plain", 12, "cat", 6))
    drive.run(make_request("salted", 12, "cat", 6, cache_salt="mine"))
    drive.run(make_request("v1", 12, "cat", 6, adapter=adapter("1")))
    drive.run(make_request("v2", 12, "cat", 6, adapter=adapter("2")))
    drive.run(make_request("v2 again", 12, "cat", 6, adapter=adapter("2")))
    assert [drive.cached[name, 0] for name in ("salted", "v1", "v2")] == [0, 0, 0]
    assert drive.cached["v2 again", 0] == 23
    # The embeddings do not depend on an adapter of the language model alone.
    assert drive.runner.encoded == ["cat"]
    drive.run(make_request("sees otherwise", 12, "cat", 6, adapter=adapter("3", changes_encoder=True)))
    assert drive.runner.encoded == ["cat", "cat"]
    drive.expect_right_answers()


def test_media_wholly_inside_the_hit_need_neither_pixels_nor_embeddings() -> None:
    drive = Drive(make_config(num_pictures=1))
    drive.run(make_request("first", 4, "cat", 6))
    drive.run(make_request("evicts", 2, "dog", 2))
    drive.run(make_request("again", 4, "cat", 6))
    assert drive.runner.encoded == ["cat", "dog"]
    assert ("again", "cat") not in drive.needed
    drive.expect_right_answers()


def test_without_prefix_caching_everything_is_computed_and_nothing_encoded_twice() -> None:
    drive = Drive(make_config(caches_prefixes=False))
    drive.run(make_request("first", 8, "cat", 6))
    drive.run(make_request("again", 8, "cat", 6))
    assert drive.cached["again", 0] == 0
    assert drive.runner.num_computed_tokens == 2 * (20 + 4)
    assert drive.runner.encoded == ["cat"]


def test_after_a_reset_everything_is_computed_again() -> None:
    drive = Drive(make_config())
    for name, reset in {
        "a": ResetCaches("reset"),
        "b": ResetCaches("reset", prefix=True),
        "c": ResetCaches("reset", True, True),
    }.items():
        drive.scheduler.reset(prefix=reset.prefix, encoder=reset.encoder)
        drive.run(make_request(name, 8, "cat", 6))
    assert [drive.cached[name, 0] for name in "abc"] == [0, 0, 0]
    assert drive.runner.encoded == ["cat", "cat"]
