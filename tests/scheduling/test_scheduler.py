"""What is computed when, and for whom: the scheduler's decisions, read off its plans."""

from collections.abc import Sequence
from itertools import cycle
from random import Random
from typing import Any

import pytest

from keepsight.engine_config import EngineConfig
from keepsight.requests import ResetCaches
from keepsight.scheduling import page_grants, step_draft
from keepsight.scheduling.kv_cache_manager import PrefixHit
from keepsight.scheduling.request_state import ParkedFor
from keepsight.scheduling.step_plan import StepPlan
from tests.scheduling.drive import TOKENS_PER_PICTURE, Drive, adapter, make_config, make_request, with_text


def lengths(plans: list[StepPlan]) -> list[list[int]]:
    return [[piece.length for piece in plan.now] for plan in plans]


# The four flows of the published cases ------------------------------------------------------------------------


def test_the_first_request_misses_everywhere() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 6))
    assert drive.needed == [("first", "cat")]
    assert drive.runner.encoded == ["cat"]
    assert drive.cached["first", 0] == 0
    drive.expect_right_answers()


def test_the_same_picture_and_prompt_hit_everywhere() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 6))
    drive.run(make_request("again", 8, "cat", 6))
    # 20 tokens; the last block of 4 holds the one token that must be computed.
    assert drive.cached["again", 0] == 16
    assert drive.needed == [("first", "cat")]
    assert drive.runner.encoded == ["cat"]
    assert drive.tokens["again", 0] == drive.tokens["first", 0]


def test_the_same_picture_with_another_prompt_hits_the_encoder_and_the_common_prefix() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 6))
    drive.run(make_request("other_end", 8, "cat", 2, max_tokens=3))
    drive.run(with_text(make_request("other_beginning", 8, "cat", 6), [9] * 14))
    # Up to the picture's last whole block; its remaining two tokens come from the embeddings that are held.
    assert drive.cached["other_end", 0] == 12
    assert drive.cached["other_beginning", 0] == 0
    assert drive.runner.encoded == ["cat"]
    drive.expect_right_answers()


def test_another_picture_with_the_same_text_shares_nothing_after_it() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 9, "cat", 6))
    drive.run(make_request("other", 9, "dog", 6))
    assert drive.cached["other", 0] == 8
    assert drive.runner.encoded == ["cat", "dog"]
    drive.expect_right_answers()


# The same prompt again -----------------------------------------------------------------------------------------


def test_the_same_prompt_has_its_first_token_before_anything_is_computed() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 5))
    plans = drive.run(make_request("again", 8, "cat", 5, max_tokens=3))
    assert [len(plan.recall) for plan in plans] == [1, 0, 0]
    # The three tokens of the prompt that fill no block, and the answer's first.
    assert lengths(plans) == [[], [4], [1]]
    assert drive.cached["again", 0] == 16
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_first_token_is_drawn_once_though_others_come_back_into_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_ends_of_prompts_begun_before_all_was_forgotten_are_not_found(num_steps: int) -> None:
    drive = Drive(make_config(max_num_batched_tokens=14))
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
    drive.run(make_request("again", text_before, "cat", 1))
    num_tokens = text_before + 7
    assert drive.cached["again", 0] == (num_tokens - 1) // 8 * 8
    drive.expect_right_answers()


def test_a_salt_or_another_version_of_an_adapter_shares_nothing() -> None:
    drive = Drive(make_config())
    drive.run(make_request("plain", 12, "cat", 6))
    drive.run(make_request("salted", 12, "cat", 6, cache_salt="mine"))
    drive.run(make_request("v1", 12, "cat", 6, adapter=adapter("1")))
    drive.run(make_request("v2", 12, "cat", 6, adapter=adapter("2")))
    drive.run(make_request("v2 again", 12, "cat", 6, adapter=adapter("2")))
    assert [drive.cached[name, 0] for name in ("salted", "v1", "v2")] == [0, 0, 0]
    assert drive.cached["v2 again", 0] == 20
    # Its embeddings do not depend on an adapter of the language model alone.
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


def test_what_is_reset_is_computed_again() -> None:
    drive = Drive(make_config())
    for name, reset in {"a": ResetCaches(), "b": ResetCaches(prefix=True), "c": ResetCaches(True, True)}.items():
        drive.scheduler.reset(prefix=reset.prefix, encoder=reset.encoder)
        drive.run(make_request(name, 8, "cat", 6))
    assert [drive.cached[name, 0] for name in "abc"] == [0, 0, 0]
    assert drive.runner.encoded == ["cat", "cat"]


# Encoding -----------------------------------------------------------------------------------------------------


def test_a_picture_that_many_want_at_once_is_encoded_once() -> None:
    drive = Drive(make_config())
    drive.run(*(make_request(name, 3 + index, "cat", 4, "cat") for index, name in enumerate("abcd")))
    assert drive.runner.encoded == ["cat"]
    drive.expect_right_answers()


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_what_is_not_kept_for_other_requests_is_still_encoded_once_for_one(caches_prefixes: bool) -> None:
    drive = Drive(make_config(shares_embeddings=False, caches_prefixes=caches_prefixes))
    drive.run(make_request("twice", 3, "cat", 4, "cat", 2))
    assert drive.runner.encoded == ["cat"]
    drive.run(with_text(make_request("choices", 3, "cat", 4, n=4), [9] * 7))
    assert drive.runner.encoded == ["cat", "cat"]
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_picture_larger_than_the_encoder_cache_is_served_and_not_kept() -> None:
    config = make_config()
    small = EngineConfig(
        scheduler=config.scheduler,
        kv_cache=config.kv_cache,
        encoder_cache=type(config.encoder_cache)(max_bytes=40, bytes_per_embedding=8),
    )
    drive = Drive(small)
    drive.run(make_request("a", 3, "cat", 4), make_request("b", 2, "dog", 1, "cat", 3))
    drive.expect_right_answers()
    drive.expect_nothing_left()
    assert drive.runner.embeddings == {}


def test_pictures_of_one_request_are_encoded_together_as_far_as_the_budget_goes() -> None:
    drive = Drive(make_config(max_num_encoder_input_tokens=12))
    plans = drive.run(make_request("a", 3, "cat", 3, "dog", 3, "owl", 3))
    assert [[each.media_hash for each in plan.encode] for plan in plans if plan.encode] == [["cat", "dog"], ["owl"]]


def test_all_missing_pixels_are_asked_for_at_once() -> None:
    drive = Drive(make_config(num_pictures=1), delivers=False)
    drive.add(make_request("a", 3, "cat", 3, "dog", 3, "cat"))
    drive.step()
    assert drive.needed == [("a", "cat"), ("a", "dog")]


def test_pixels_that_many_want_are_asked_of_one_and_of_the_next_when_it_leaves() -> None:
    drive = Drive(make_config(), delivers=False)
    for name in "abc":
        drive.add(with_text(make_request(name, 3, "cat", 3, n=2), [20 + ord(name) % 5] * 6))
    drive.step()
    assert drive.needed == [("a", "cat")]
    drive.scheduler.abort("b")
    drive.scheduler.abort("a")
    drive.step()
    assert drive.needed == [("a", "cat"), ("c", "cat")]
    drive.deliver("cat")
    drive.run()
    assert drive.finished.keys() == {("c", 0), ("c", 1)}
    drive.expect_right_answers()


def drive_whose_client_left_amid_its_encodings() -> Drive:
    drive = Drive(make_config(), is_done=lambda: False)
    drive.add(make_request("gone", "cat", "dog", 3))
    while not drive.step().encode:
        pass
    drive.scheduler.abort("gone")
    assert drive.step().unwanted == ["cat", "dog"]
    return drive


def test_what_was_to_be_encoded_for_who_left_keeps_nobody_waiting() -> None:
    drive = drive_whose_client_left_amid_its_encodings()
    drive.runner.set_pace(lambda: True)
    drive.run(make_request("next", "owl", 3))
    assert drive.runner.encoded == ["owl"]
    drive.expect_nothing_left()
    assert drive.believed == {"owl"}


def test_what_was_left_out_is_encoded_once_for_who_came_to_want_it_meanwhile() -> None:
    drive = drive_whose_client_left_amid_its_encodings()
    drive.runner.set_pace(lambda: True)
    drive.run(make_request("next", "dog", 3))
    assert drive.runner.encoded == ["dog"]
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_who_waits_for_media_or_for_the_encoder_holds_nobody_back() -> None:
    drive = Drive(make_config(max_num_seqs=1, num_pictures=1), delivers=False, is_done=lambda: False)
    drive.add(make_request("waits for pixels", 3, "cat", 3))
    drive.step()
    drive.add(make_request("waits for the encoder", 3, "dog", 3))
    drive.step()
    drive.deliver("dog")
    drive.step()
    drive.add(make_request("text", 3))
    for _ in range(5):
        drive.step()
    assert drive.finished == {("text", 0): "length"}


def drive_short_of_pages(**config: Any) -> Drive:
    """A prompt keeps most pages with the text before its picture; what lies beside the steps takes for ever."""
    drive = Drive(make_config(num_blocks=20, **config), delivers=False, is_done=lambda: False)
    drive.add(make_request("picture", 56, "cat", 3))
    drive.step()
    drive.step()
    return drive


def expect_a_stream_to_end(drive: Drive) -> None:
    drive.add(with_text(make_request("stream", 10, max_tokens=60, ignore_eos=True), [9] * 10))
    for _ in range(61):
        drive.step()
    assert drive.finished == {("stream", 0): "length"}


def test_who_waits_for_pixels_keeps_no_pages_that_a_running_answer_lacks() -> None:
    drive = drive_short_of_pages()
    expect_a_stream_to_end(drive)
    drive.runner.set_pace(lambda: True)
    drive.deliver("cat")
    drive.expect_all_answered()


def test_who_waits_for_the_encoder_keeps_no_pages_that_a_running_answer_lacks() -> None:
    drive = drive_short_of_pages()
    drive.deliver("cat")
    drive.step()
    expect_a_stream_to_end(drive)
    drive.runner.set_pace(lambda: True)
    drive.run()
    assert drive.runner.encoded == ["cat"], "the embeddings were on their way"
    drive.expect_right_answers()


def test_who_waits_for_pixels_keeps_no_pages_that_a_new_prompt_lacks() -> None:
    drive = drive_short_of_pages()
    drive.add(with_text(make_request("text", 30), [9] * 30))
    for _ in range(6):
        drive.step()
    assert drive.finished.keys() == {("text", 0)}


def test_who_gave_pages_away_takes_none_again_until_it_gets_further() -> None:
    drive = drive_short_of_pages(caches_prefixes=False)
    drive.add(with_text(make_request("text", 30), [9] * 30))
    drive.step()
    drive.deliver("cat")
    for _ in range(8):
        drive.step()
    assert drive.scheduler.kv_cache.usage == 0
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_those_who_keep_taking_the_pages_of_one_who_waits_for_media_starve_it_not() -> None:
    drive = Drive(make_config(num_blocks=20, num_pictures=1, shares_embeddings=False, caches_prefixes=False))
    drive.runner.set_pace(lambda: len(drive.runner.plans) % 8 == 0)
    drive.add(make_request("pictures", 3, "cat", 2, "dog", 33, "owl", 3))
    for number in range(400):
        if len(drive.scheduler.lineup) < 4:
            drive.add(make_request(f"text{number}", 20, cache_salt=f"{number}", max_tokens=20, ignore_eos=True))
        drive.step()
    assert ("pictures", 0) in drive.finished
    drive.expect_all_answered()


def test_embeddings_are_released_with_the_last_position_that_reads_them() -> None:
    drive = Drive(make_config(num_pictures=1, max_num_batched_tokens=13))
    drive.run(make_request("a", 4, "cat", 4, "dog", 4, "owl", 4))
    assert drive.runner.encoded == ["cat", "dog", "owl"]
    drive.expect_right_answers()


def test_a_picture_that_cannot_be_encoded_fails_its_request_and_no_other() -> None:
    drive = Drive(make_config())
    drive.runner.bad_media = {"cat"}
    drive.run(make_request("bad", 3, "cat", 3, n=2), make_request("good", 3, "dog", 3))
    assert drive.failed.keys() == {"bad"}
    assert drive.failed["bad"].message == "a bad picture"
    assert drive.finished == {("good", 0): "length"}
    drive.expect_nothing_left()


# Budgets ------------------------------------------------------------------------------------------------------


def test_a_picture_is_computed_whole() -> None:
    drive = Drive(make_config(max_num_batched_tokens=6, max_num_seqs=1, max_prompt_tokens_beside_streams=None))
    plans = drive.run(make_request("a", 4, "cat", 2, max_tokens=1))
    assert lengths(plans) == [[], [4], [6], [2]]  # the first only encodes


def test_a_long_prompt_is_computed_in_chunks_beside_what_runs() -> None:
    drive = Drive(make_config(max_num_batched_tokens=9, max_num_seqs=3))
    plans = drive.run(make_request("short", 2, max_tokens=4), make_request("long", 20, max_tokens=1))
    assert lengths(plans) == [[2, 7], [1, 8], [1, 5], [1]]
    drive.expect_right_answers()


def test_what_is_left_of_a_step_begins_no_prompt_that_could_soon_find_its_beginning() -> None:
    drive = Drive(make_config(max_num_batched_tokens=64))
    drive.run(make_request("before", "cat", 1))
    drive.run(
        make_request("long", 56, cache_salt="another's"), make_request("b", 3, "cat", 5), make_request("c", 3, "cat", 9)
    )
    assert drive.cached["c", 0] == 12
    drive.expect_right_answers()


def drive_with_many_who_wait_to_join(num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """Beside a stream, of which one can join with each step."""
    monkeypatch.setattr(step_draft, "CROWD_TOKENS", 8)
    drive = Drive(make_config(max_prompt_tokens_beside_streams=8, num_blocks=128))
    drive.add(make_request("stream", 3, max_tokens=90, ignore_eos=True))
    drive.step()
    for number in range(num_waiting):
        drive.add(make_request(f"{number}", 8, cache_salt=f"{number}", max_tokens=1))
    drive.step()
    return drive


def test_those_who_wait_to_join_are_not_all_looked_at_with_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = drive_with_many_who_wait_to_join(40, monkeypatch)
    find_prefix, num_looks = drive.scheduler.kv_cache.find_prefix, 0

    def count_and_find(hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        nonlocal num_looks
        num_looks += 1
        return find_prefix(hashes, num_tokens)

    monkeypatch.setattr(drive.scheduler.kv_cache, "find_prefix", count_and_find)
    plans = [drive.step() for _ in range(39)]
    assert num_looks <= 2 * 39
    assert [plan.now[-1].sequence_id[0] for plan in plans] == [f"{number}" for number in range(1, 40)]
    drive.expect_all_answered()


def test_who_waits_to_join_has_its_first_token_once_its_prompt_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = drive_with_many_who_wait_to_join(40, monkeypatch)
    drive.add(make_request("urgent", 8, cache_salt="39", max_tokens=1, priority=-1))
    assert drive.step().now[-1].sequence_id[0] == "urgent"
    assert [recall.sequence_id[0] for recall in drive.step().recall] == ["39"]
    drive.expect_all_answered()


def test_who_waits_for_more_room_is_not_overtaken_by_those_who_would_take_it() -> None:
    drive = Drive(make_config(max_num_batched_tokens=64))
    drive.run(make_request("before", "cat", 1))
    drive.add(make_request("first", 60, cache_salt="first", max_tokens=1))
    drive.add(make_request("picture", 3, "cat", 5, max_tokens=1))
    for number in range(8):
        # Each would leave the next step four tokens short of a whole one.
        drive.add(make_request(f"later{number}", 64, cache_salt=f"{number}", max_tokens=1))
        drive.step()
    assert ("picture", 0) in drive.finished
    drive.expect_all_answered()


def test_a_short_beginning_is_computed_where_a_step_has_room_for_no_more() -> None:
    drive = Drive(make_config(max_num_batched_tokens=13))
    drive.run(make_request("a", 10, "cat", 3))
    drive.expect_right_answers()


@pytest.mark.parametrize(("max_tokens", "num_pages"), [(1, 1), (2, 2), (5, 2), (6, 3)])
def test_no_page_is_taken_ahead_for_the_answer_s_last_token(max_tokens: int, num_pages: int) -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=0), is_done=lambda: False)
    drive.add(make_request("a", 4, max_tokens=max_tokens, ignore_eos=True))
    drive.scheduler.schedule()
    assert drive.scheduler.kv_cache.num_blocks_of(("a", 0)) == num_pages


def test_no_more_sequences_run_than_allowed() -> None:
    drive = Drive(make_config(max_num_seqs=2))
    plans = drive.run(*(make_request(str(index), 3) for index in range(7)))
    assert max(len(plan.now) for plan in plans) == 2
    assert len(drive.finished) == 7


def test_those_of_smaller_priority_number_go_first() -> None:
    drive = Drive(make_config(max_num_seqs=1))
    plans = drive.run(make_request("late", 3, priority=1), make_request("soon", 4), make_request("now", 5, priority=-1))
    order = [piece.sequence_id[0] for plan in plans for piece in plan.now if piece.start == 0]
    assert order == ["now", "soon", "late"]


def test_who_runs_out_of_pages_takes_them_from_the_last_and_both_answers_stay_right() -> None:
    drive = Drive(make_config(num_blocks=8, caches_prefixes=False))
    drive.run(make_request("first", 9, max_tokens=12), make_request("last", 8, max_tokens=12))
    assert drive.scheduler.pages.num_preemptions > 0
    assert len(drive.finished) == 2
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_the_choices_of_a_request_share_the_whole_blocks_of_its_prompt() -> None:
    drive = Drive(make_config())
    drive.run(make_request("a", 10, "cat", 6, n=3, max_tokens=4))
    assert [drive.cached["a", choice] for choice in range(3)] == [0, 20, 20]
    assert len({tuple(drive.tokens["a", choice]) for choice in range(3)}) == 3
    drive.expect_right_answers()


@pytest.mark.parametrize("num_choices", [1, 4])
def test_prompts_whose_pictures_are_encoded_one_after_the_other_are_still_one_prefill(num_choices: int) -> None:
    """A hit ends inside each picture, whose rest everybody computes for itself, and waits with it for the next."""
    drive = Drive(make_config(max_prompt_ends=0), is_done=cycle([False] * 4 + [True]).__next__)
    parts = (5, "cat", "dog", "owl", 4)
    drive.run(*(make_request(f"{number}", *parts, n=num_choices, max_tokens=1) for number in range(4 // num_choices)))
    assert drive.runner.encoded == ["cat", "dog", "owl"]
    # 27 tokens once; by each of the others three of the cat's, one of the dog's, three behind the last whole block.
    assert drive.runner.num_computed_tokens == 27 + 3 * (3 + 1 + 3)
    assert [drive.cached[choice] for choice in sorted(drive.tokens)] == [0, 8, 8, 8]
    drive.expect_right_answers()
    drive.expect_nothing_left()


# The lane beside the streams ----------------------------------------------------------------------------------


def beside_drive(max_joining: int = 4) -> Drive:
    """One stream runs; what lies beside it takes as long as `is_done` says."""
    drive = Drive(make_config(max_prompt_tokens_beside_streams=max_joining))
    drive.add(make_request("stream", 3, max_tokens=40, ignore_eos=True))
    drive.step()
    drive.is_done = lambda: False
    drive.runner.set_pace(drive.is_done)
    return drive


def test_a_long_prompt_runs_beside_the_streams_and_a_short_one_joins_them() -> None:
    drive = beside_drive()
    drive.add(make_request("long", 20))
    drive.add(make_request("short", 4))
    plan = drive.step()
    assert [(piece.sequence_id[0], piece.length) for piece in plan.beside] == [("long", 20)]
    assert [(piece.sequence_id[0], piece.length) for piece in plan.now] == [("stream", 1), ("short", 4)]
    for _ in range(3):
        plan = drive.step()
        assert [piece.sequence_id[0] for piece in plan.now] == ["stream", "short"]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_without_streams_every_prompt_is_computed_at_once() -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=4))
    plans = drive.run(make_request("a", 30, max_tokens=1), with_text(make_request("b", 20, max_tokens=1), [9] * 20))
    assert lengths(plans) == [[30, 20]]


def test_a_prompt_whose_lane_is_taken_waits_and_holds_nobody_back() -> None:
    drive = beside_drive()
    drive.add(make_request("long", 20))
    drive.step()
    drive.add(make_request("longer", 30))
    drive.add(make_request("short", 2, max_tokens=2))
    for _ in range(3):
        plan = drive.step()
        assert not plan.beside
    assert ("short", 0) in drive.finished
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_where_many_wait_all_join_and_the_lane_is_taken_again_when_few_do() -> None:
    drive = beside_drive()
    for number in range(5):
        drive.add(make_request(f"{number}", 20, cache_salt=f"{number}", max_tokens=40, ignore_eos=True))
    plans = [drive.step(), drive.step()]
    assert [[piece.sequence_id[0] for piece in plan.now] for plan in plans] == 2 * [["stream", "0", "1", "2"]]
    assert [[piece.sequence_id[0] for piece in plan.beside] for plan in plans] == [[], ["3", "4"]]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_short_prompts_do_not_wait_for_a_long_one_that_joins_with_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_draft, "CROWD_TOKENS", 16)
    drive = beside_drive()
    drive.add(make_request("long", 120, cache_salt="its own"))
    for number in range(5):
        drive.add(make_request(f"{number}", 4, cache_salt=f"{number}", max_tokens=1))
    planned = [[(piece.sequence_id[0], piece.length) for piece in drive.step().now] for _ in range(2)]
    assert planned == [[("stream", 1), ("long", 12), ("0", 4)], [("stream", 1), ("long", 12), ("1", 4)]]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


@pytest.mark.parametrize("seed", range(10))
def test_nobody_who_waits_is_overlooked_where_streams_pause_for_encodings(seed: int) -> None:
    config = make_config(
        num_blocks=60, block_size=1, caches_prefixes=False, max_prompt_ends=0, num_pictures=2, shares_embeddings=False,
        max_num_batched_tokens=8, max_num_seqs=2, max_num_encoder_input_tokens=2 * TOKENS_PER_PICTURE,
        max_prompt_tokens_beside_streams=1, takes_turns=True,
    )  # fmt: skip
    pace = Random(seed)
    drive = Drive(config, is_done=lambda: pace.random() < 0.1)
    drive.add(make_request("text", 1, max_tokens=3))
    drive.add(make_request("dog", "dog", cache_salt="x", max_tokens=1))
    drive.add(make_request("both", 1, 1, "dog", "cat", cache_salt="x", max_tokens=1, n=2, priority=-1))
    drive.run(max_steps=5000)  # sees whether the loop would sleep though there is something to ask for
    drive.expect_right_answers()


def test_a_short_prompt_does_not_wait_for_the_beginning_that_a_long_one_computes_beside() -> None:
    drive = beside_drive(max_joining=8)
    drive.add(make_request("long", 20))
    drive.step()
    drive.add(make_request("short", 6))
    drive.add(make_request("as short", 7))
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["stream", "short"]
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["stream", "short", "as short"]
    assert drive.cached["as short", 0] == 4, "of the first that joined"
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_a_short_prompt_waits_for_the_picture_that_a_long_one_computes_beside() -> None:
    drive = beside_drive(max_joining=16)
    drive.add(make_request("long", 2, "cat", 30))
    drive.runner.set_pace(lambda: drive.runner.encoded == [])
    while not any(drive.step().beside):
        pass
    drive.add(make_request("short", 2, "cat", 2))
    drive.step()
    assert [state.parked_for for state in drive.scheduler.lineup.parked] == [ParkedFor.PREFIX]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_who_waits_for_a_prefix_is_looked_at_again_only_when_that_prefix_has_changed() -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=1), is_done=lambda: False)
    parked = drive.scheduler.lineup.parked
    drive.add(make_request("stream", 3, max_tokens=40, ignore_eos=True))
    drive.step()
    drive.add(make_request("first", 20))
    drive.add(make_request("same", 20, max_tokens=6))
    for _ in range(9):  # in which the stream fills two blocks
        drive.step()
        assert [each.parked_for for each in parked] == [ParkedFor.PREFIX]
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.step()
    assert [each.parked_for for each in parked] == [ParkedFor.LANE]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_who_is_aborted_while_under_way_keeps_its_pages_until_the_work_is_done() -> None:
    drive = beside_drive()
    drive.add(make_request("long", 20))
    drive.step()
    num_free = drive.scheduler.kv_cache.pool.num_free
    drive.scheduler.abort("long")
    drive.step()
    assert drive.scheduler.kv_cache.pool.num_free <= num_free
    drive.runner.set_pace(lambda: True)
    drive.run()
    drive.expect_nothing_left()
    # Its work was not for nothing.
    drive.run(make_request("again", 20, max_tokens=1))
    assert drive.cached["again", 0] == 16


def test_who_lacks_a_page_takes_none_from_whoever_is_computed_beside_but_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_grants, "TOKENS_AHEAD", 0)
    drive = Drive(make_config(num_blocks=10, max_prompt_tokens_beside_streams=0), is_done=lambda: False)
    drive.add(make_request("stream", 3, max_tokens=30, ignore_eos=True))
    drive.step()
    drive.add(make_request("long", 32, cache_salt="its own"))
    for _ in range(9):
        drive.step()
    # Two pages of ten are its own, and they are full.
    assert len(drive.tokens["stream", 0]) == 6
    assert drive.scheduler.pages.num_preemptions == 0
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_for_throughput_answers_pause_while_pictures_are_encoded() -> None:
    drive = Drive(make_config(takes_turns=True))
    drive.add(make_request("text", 3, max_tokens=4, ignore_eos=True))
    drive.step()
    drive.runner.set_pace(lambda: False)
    drive.add(make_request("picture", 3, "cat", 3, max_tokens=4, ignore_eos=True))
    drive.step()
    for _ in range(4):
        drive.step()
    assert len(drive.tokens["text", 0]) < 4
    drive.runner.set_pace(lambda: True)
    plans = drive.run()
    assert max(len(plan.now) for plan in plans) == 2
    drive.expect_right_answers()


def test_for_throughput_a_round_of_encodings_and_a_step_of_prompts_take_turns() -> None:
    drive = Drive(make_config(takes_turns=True), is_done=lambda: False)
    drive.add(make_request("pictures", "cat", 2, "dog", 2, max_tokens=1))
    drive.step()
    assert [each.media_hash for each in drive.step().encode] == ["cat", "dog"]
    drive.add(make_request("another", "owl", 2, max_tokens=1))
    drive.add(make_request("text", 9, max_tokens=1))
    for _ in range(3):
        assert not drive.step().now
    drive.runner.set_pace(lambda: True)
    drive.step()
    prompts = drive.step()
    assert {each.sequence_id[0] for each in prompts.now} == {"pictures", "text"}
    assert not prompts.encode
    assert [each.media_hash for each in drive.step().encode] == ["owl"]
    drive.expect_all_answered()


@pytest.mark.parametrize("others", [(9,), ("owl", 9)], ids=["texts", "pictures"])
def test_for_throughput_whoever_keeps_coming_starves_nobody(others: tuple[int | str, ...]) -> None:
    drive = Drive(make_config(takes_turns=True, num_blocks=200))
    for number in range(40):
        drive.add(make_request(f"other{number}", *(f"{each}{number}" if each == "owl" else each for each in others)))
        if number == 4:
            drive.add(make_request("text", 9, max_tokens=1, priority=1))
            drive.add(make_request("picture", "cat", 2, max_tokens=1, priority=1))
        if number == 30:
            assert {("text", 0), ("picture", 0)} <= drive.finished.keys()
        drive.step()
    drive.expect_all_answered()


def test_answers_that_fill_all_seats_do_not_pause() -> None:
    drive = Drive(make_config(takes_turns=True, max_num_seqs=1), is_done=lambda: False)
    drive.add(make_request("text", 3, max_tokens=4))
    drive.add(make_request("picture", 3, "cat", 3))
    for _ in range(6):
        drive.step()
    assert ("text", 0) in drive.finished


# Ends ---------------------------------------------------------------------------------------------------------


def test_an_answer_ends_at_an_end_token_at_max_tokens_or_where_the_context_ends() -> None:
    drive = Drive(make_config(num_blocks=10))
    drive.run(
        make_request("few", 5, max_tokens=3, ignore_eos=True),
        make_request("context", 30, max_tokens=None, ignore_eos=True),
        make_request("stop", 5, max_tokens=30, ignore_eos=True),
    )
    assert drive.finished == {("few", 0): "length", ("context", 0): "length", ("stop", 0): "length"}
    assert len(drive.tokens["context", 0]) == 10
    stop_id = drive.tokens["stop", 0][4]
    drive.run(make_request("stopped", 5, max_tokens=30, ignore_eos=True, stop_token_ids=[stop_id]))
    drive.expect_right_answers()
    assert drive.finished["stopped", 0] == "stop"


def test_a_request_that_can_never_run_is_refused_with_the_numbers() -> None:
    drive = Drive(make_config(num_blocks=10))
    refusal = drive.add(make_request("long", 40))
    assert refusal is not None
    assert refusal.is_refusal
    assert "40" in refusal.message
    drive.add(make_request("twice", 3))
    assert drive.add(make_request("twice", 3)) is not None


@pytest.mark.parametrize("num_steps", range(6))
def test_a_request_may_be_aborted_at_any_moment(num_steps: int) -> None:
    drive = Drive(make_config(max_num_batched_tokens=14), is_done=iter([True, False] * 50).__next__)
    drive.add(make_request("a", 10, "cat", 5, n=2))
    drive.add(make_request("b", 12, "cat", 3))
    for _ in range(num_steps):
        drive.step()
    drive.scheduler.abort("a")
    drive.scheduler.abort("never heard of")
    drive.run()
    assert ("b", 0) in drive.finished
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_choice_may_be_ended_alone() -> None:
    drive = Drive(make_config())
    drive.add(make_request("a", 6, n=3, max_tokens=6, ignore_eos=True))
    drive.step()
    drive.step()
    drive.scheduler.abort("a", 1)
    drive.run()
    assert drive.finished.keys() == {("a", 0), ("a", 2)}
    drive.expect_right_answers()


def test_hints_say_what_the_engine_holds_while_any_cache_holds_anything_of_it() -> None:
    drive = Drive(make_config(num_pictures=1))
    drive.run(make_request("a", 3, "cat", 9))
    assert drive.believed == {"cat"}
    drive.run(make_request("b", 3, "dog", 9))  # its embeddings take the place of the cat's
    assert drive.believed == {"cat", "dog"}
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.step()
    assert drive.believed == {"dog"}
    drive.scheduler.reset(prefix=False, encoder=True)
    drive.step()
    assert drive.believed == set()


def test_a_picture_is_held_from_the_beginning_of_its_encoding() -> None:
    drive = Drive(make_config(), is_done=lambda: False)
    drive.add(make_request("a", 3, "cat"))
    drive.step()
    assert drive.believed == set()
    drive.step()
    assert drive.believed == {"cat"}


def test_a_picture_that_could_not_be_encoded_is_not_held() -> None:
    drive = Drive(make_config())
    drive.runner.bad_media = {"cat"}
    drive.run(make_request("a", 3, "cat"))
    assert drive.believed == set()


def test_a_picture_whose_blocks_made_room_is_not_held() -> None:
    drive = Drive(make_config(num_blocks=8, shares_embeddings=False))
    drive.run(make_request("a", 3, "cat"))
    assert drive.believed == {"cat"}
    drive.run(make_request("b", 26, ignore_eos=True))
    assert drive.believed == set()


def test_what_one_leaves_behind_who_went_while_under_way_is_held() -> None:
    drive = beside_drive()
    drive.add(make_request("long", 9, "cat", 9))
    drive.runner.set_pace(lambda: not drive.scheduler.media.encoder_cache.is_ready("cat"))
    while not drive.step().beside:
        pass
    drive.scheduler.abort("long")
    drive.scheduler.reset(prefix=False, encoder=True)
    drive.step()
    assert drive.believed == set()
    drive.runner.set_pace(lambda: True)
    drive.step()
    assert drive.believed == {"cat"}


def test_without_caches_nothing_is_ever_held() -> None:
    drive = Drive(make_config(shares_embeddings=False, caches_prefixes=False))
    drive.run(make_request("a", 3, "cat", 9))
    assert drive.believed == set()


def test_pixels_that_are_kept_beside_count_too_however_often_they_are_told_of() -> None:
    drive = Drive(make_config(shares_embeddings=False, caches_prefixes=False))
    for _ in range(2):
        drive.scheduler.kept.note_pixels(["cat", "dog"], [])
    drive.step()
    assert drive.believed == {"cat", "dog"}
    for _ in range(2):
        drive.scheduler.kept.note_pixels([], ["cat", "owl"])
    drive.step()
    assert drive.believed == {"dog"}
