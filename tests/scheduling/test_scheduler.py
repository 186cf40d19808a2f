"""The scheduler's decisions, read from its plans: what is computed, when, and for which sequence."""

from dataclasses import replace
from itertools import cycle

import pytest

from keepsight.engine_config import EngineConfig
from keepsight.scheduling import step_draft
from keepsight.scheduling.request_state import ParkedFor
from tests.scheduling.drive import Drive, beside_drive, lengths, make_config, make_request, with_text

# The four published cases -------------------------------------------------------------------------------------


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
    # One of the 20 tokens must be computed: the last block begins like a held one, which is copied.
    assert drive.cached["again", 0] == 19
    assert drive.needed == [("first", "cat")]
    assert drive.runner.encoded == ["cat"]
    assert drive.tokens["again", 0] == drive.tokens["first", 0]


def test_the_same_picture_with_another_prompt_hits_the_encoder_and_the_common_prefix() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 8, "cat", 6))
    drive.run(make_request("other_end", 8, "cat", 2, max_tokens=3))
    drive.run(with_text(make_request("other_beginning", 8, "cat", 6), [9] * 14))
    # Its text equals the first two tokens of the other's, and one must be computed.
    assert drive.cached["other_end", 0] == 15
    assert drive.cached["other_beginning", 0] == 0
    assert drive.runner.encoded == ["cat"]
    drive.expect_right_answers()


def test_another_picture_with_the_same_text_shares_nothing_after_it() -> None:
    drive = Drive(make_config())
    drive.run(make_request("first", 9, "cat", 6))
    drive.run(make_request("other", 9, "dog", 6))
    # Everything before it, and nothing more, even in the block in which it begins.
    assert drive.cached["other", 0] == 9
    assert drive.runner.encoded == ["cat", "dog"]
    drive.expect_right_answers()


# Encoding -----------------------------------------------------------------------------------------------------


def test_a_picture_that_many_want_at_once_is_encoded_once() -> None:
    drive = Drive(make_config())
    drive.run(*(make_request(name, 3 + index, "cat", 4, "cat") for index, name in enumerate("abcd")))
    assert drive.runner.encoded == ["cat"]
    drive.expect_right_answers()


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_an_unshared_picture_is_still_encoded_once_per_request(caches_prefixes: bool) -> None:
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


def test_an_encoding_planned_for_an_aborted_request_delays_no_other() -> None:
    drive = drive_whose_client_left_amid_its_encodings()
    drive.runner.set_pace(lambda: True)
    drive.run(make_request("next", "owl", 3))
    assert drive.runner.encoded == ["owl"]
    drive.expect_nothing_left()
    assert drive.believed == {"owl"}


def test_a_skipped_item_is_encoded_once_for_a_request_that_wants_it_meanwhile() -> None:
    drive = drive_whose_client_left_amid_its_encodings()
    drive.runner.set_pace(lambda: True)
    drive.run(make_request("next", "dog", 3))
    assert drive.runner.encoded == ["dog"]
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_request_waiting_for_media_or_the_encoder_does_not_delay_others() -> None:
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
    assert lengths(plans) == [[], [4], [6], [2]]  # the first step only encodes


def test_a_long_prompt_is_computed_in_chunks_beside_running_sequences() -> None:
    drive = Drive(make_config(max_num_batched_tokens=9, max_num_seqs=3))
    plans = drive.run(make_request("short", 2, max_tokens=4), make_request("long", 20, max_tokens=1))
    assert lengths(plans) == [[2, 7], [1, 8], [1, 5], [1]]
    drive.expect_right_answers()


def test_blocks_that_an_answer_has_filled_are_found_while_it_goes_on() -> None:
    drive = Drive(make_config())
    request = make_request("a", 3, max_tokens=40, ignore_eos=True)
    drive.add(request)
    while len(drive.tokens.get(("a", 0), ())) < 9:
        drive.step()
    beginning = (*request.token_ids, *drive.tokens["a", 0])
    drive.add(replace(make_request("b", 12, max_tokens=1), token_ids=beginning))
    drive.step()
    assert drive.cached["b", 0] == 8
    drive.expect_all_answered()


def test_the_rest_of_a_step_begins_no_prompt_that_could_soon_find_its_beginning() -> None:
    drive = Drive(make_config(max_num_batched_tokens=64))
    drive.run(make_request("before", "cat", 1))
    drive.run(
        make_request("long", 56, cache_salt="another's"), make_request("b", 3, "cat", 5), make_request("c", 3, "cat", 9)
    )
    assert drive.cached["c", 0] == 14
    drive.expect_right_answers()


def test_no_more_sequences_run_than_allowed() -> None:
    drive = Drive(make_config(max_num_seqs=2))
    plans = drive.run(*(make_request(str(index), 3) for index in range(7)))
    assert max(len(plan.now) for plan in plans) == 2
    assert len(drive.finished) == 7


def test_requests_with_smaller_priority_number_go_first() -> None:
    drive = Drive(make_config(max_num_seqs=1))
    plans = drive.run(make_request("late", 3, priority=1), make_request("soon", 4), make_request("now", 5, priority=-1))
    order = dict.fromkeys(piece.sequence_id[0] for plan in plans for piece in plan.now)
    assert list(order) == ["now", "soon", "late"]


def test_the_choices_of_a_request_share_its_prompt() -> None:
    drive = Drive(make_config())
    drive.run(make_request("a", 10, "cat", 6, n=3, max_tokens=4))
    assert [drive.cached["a", choice] for choice in range(3)] == [0, 21, 21]
    assert len({tuple(drive.tokens["a", choice]) for choice in range(3)}) == 3
    drive.expect_right_answers()


@pytest.mark.parametrize("num_choices", [1, 4])
def test_prompts_whose_pictures_are_encoded_one_after_the_other_are_still_one_prefill(num_choices: int) -> None:
    """All choices wait for the next picture and keep what was computed up to it."""
    drive = Drive(make_config(max_prompt_ends=0), is_done=cycle([False] * 4 + [True]).__next__)
    parts = (5, "cat", "dog", "owl", 4)
    drive.run(*(make_request(f"{number}", *parts, n=num_choices, max_tokens=1) for number in range(4 // num_choices)))
    assert drive.runner.encoded == ["cat", "dog", "owl"]
    # 27 tokens once, and the last one for each of the other three.
    assert drive.runner.num_computed_tokens == 27 + 3 * 1
    assert [drive.cached[choice] for choice in sorted(drive.tokens)] == [0, 26, 26, 26]
    drive.expect_right_answers()
    drive.expect_nothing_left()


# The lane beside the streams ----------------------------------------------------------------------------------


def test_a_long_prompt_runs_beside_the_streams_and_a_short_one_joins_them() -> None:
    drive = beside_drive()
    drive.add(make_request("long", 20))
    drive.add(make_request("short", 4))
    plan = drive.step()
    assert [(piece.sequence_id[0], piece.length) for piece in plan.beside] == [("long", 17)], (
        "it begins as the stream does"
    )
    assert [(piece.sequence_id[0], piece.length) for piece in plan.now] == [("stream", 1), ("short", 1)]
    for _ in range(3):
        plan = drive.step()
        assert [piece.sequence_id[0] for piece in plan.now] == ["stream", "short"]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_without_streams_every_prompt_is_computed_at_once() -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=4))
    plans = drive.run(make_request("a", 30, max_tokens=1), with_text(make_request("b", 20, max_tokens=1), [9] * 20))
    assert lengths(plans) == [[30, 20]]


def test_a_prompt_whose_lane_is_taken_waits_and_does_not_delay_others() -> None:
    drive = beside_drive()
    drive.add(make_request("long", 20))
    drive.step()
    drive.add(make_request("longer", 30, cache_salt="its own"))
    drive.add(make_request("short", 2, max_tokens=2))
    for _ in range(3):
        plan = drive.step()
        assert not plan.beside
    assert ("short", 0) in drive.finished
    drive.runner.set_pace(lambda: True)
    drive.step()
    assert [piece.sequence_id[0] for piece in drive.step().beside] == ["longer"]
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


@pytest.mark.parametrize("is_crowd", [True, False])
def test_prompts_that_wait_for_the_lane_join_once_they_are_a_crowd_or_nothing_streams(is_crowd: bool) -> None:
    drive = beside_drive()
    for number in range(3):
        drive.add(make_request(f"{number}", 20, cache_salt=f"{number}"))
        drive.step()
    assert [state.parked_for for state in drive.scheduler.lineup.parked] == [ParkedFor.LANE] * 2
    if is_crowd:
        drive.add(make_request("3", 20, cache_salt="3"))
    else:
        drive.abort("stream")
    assert {"1", "2"} <= {piece.sequence_id[0] for piece in drive.step().now}
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_short_prompts_do_not_wait_for_a_long_one_that_joins_with_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_draft, "CROWD_TOKENS", 16)
    drive = beside_drive()
    drive.add(make_request("long", 120, cache_salt="its own"))
    for number in range(5):
        drive.add(make_request(f"{number}", 4, cache_salt=f"{number}", max_tokens=1))
    planned = [[(piece.sequence_id[0], piece.length) for piece in drive.step().now] for _ in range(2)]
    assert planned == [
        [("stream", 1), ("long", 8), ("0", 4), ("1", 4)],
        [("stream", 1), ("long", 8), ("2", 4), ("3", 4)],
    ]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_a_question_too_long_to_join_alone_does_not_wait_for_books_that_join_with_a_crowd() -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=4, num_blocks=512))
    drive.add(make_request("stream", 3, max_tokens=90, ignore_eos=True))
    drive.step()
    for number in range(5):
        drive.add(make_request(f"book {number}", 300, cache_salt=f"{number}"))
    drive.step()
    drive.add(make_request("question", 20, cache_salt="question"))
    planned = [(piece.sequence_id[0], piece.length) for piece in drive.step().now]
    assert planned == [("stream", 1), ("book 0", 31), ("question", 20), ("book 1", 12)]
    drive.expect_all_answered()


def test_a_short_prompt_does_not_wait_for_the_beginning_that_a_long_one_computes_beside() -> None:
    drive = beside_drive(max_joining=8)
    drive.add(make_request("long", 20))
    drive.step()
    drive.add(make_request("short", 6))
    drive.add(make_request("as short", 7))
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["stream", "short"]
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["stream", "short", "as short"]
    assert drive.cached["as short", 0] == 6, "of the first that joined"
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


def test_a_request_waiting_for_a_prefix_is_examined_again_only_when_it_changes() -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=1), is_done=lambda: False)
    parked = drive.scheduler.lineup.parked
    drive.add(make_request("stream", 3, max_tokens=40, ignore_eos=True))
    drive.step()
    drive.add(make_request("first", 20))
    drive.add(make_request("same", 20, max_tokens=6))
    for _ in range(9):  # meanwhile the stream fills two blocks
        drive.step()
        assert [each.parked_for for each in parked] == [ParkedFor.PREFIX]
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.step()
    assert [each.parked_for for each in parked] == [ParkedFor.LANE]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_a_request_aborted_while_computed_keeps_its_pages_until_the_work_is_done() -> None:
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
    # What it computed can still be found.
    drive.run(make_request("again", 20, max_tokens=1))
    assert drive.cached["again", 0] == 19


@pytest.mark.parametrize("is_other", [False, True])
def test_a_request_aborted_while_computed_may_return_under_its_id_at_once(is_other: bool) -> None:
    drive = beside_drive()
    drive.add(make_request("long", 20, n=2))
    assert [piece.sequence_id[0] for piece in drive.step().beside] == ["long"]
    drive.abort("long")
    assert drive.add(make_request("long", "cat", 14) if is_other else make_request("long", 20, n=2)) is None
    drive.step()
    assert not drive.tokens.keys() & {("long", 0), ("long", 1)}
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert ("long", 0) in drive.finished


def test_a_request_that_reuses_an_id_does_not_fail_with_the_first_one() -> None:
    drive = beside_drive()
    drive.runner.bad_media = {"cat"}
    drive.runner.set_pace(iter([True, *[False] * 9]).__next__)  # the dog's encoding
    drive.add(make_request("long", "dog", 20, "cat"))
    while not drive.step().beside:
        pass
    assert drive.runner.encoded == ["dog"]
    drive.add(make_request("other", "cat", 3))
    drive.abort("long")
    drive.add(make_request("long", 30))
    drive.runner.set_pace(iter([True, False]).__next__)  # the cat's, and not yet the slice
    drive.step()
    drive.runner.set_pace(lambda: True)
    drive.run()
    assert drive.failed.keys() == {"other"}
    drive.expect_right_answers()
    drive.expect_nothing_left()


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_request_that_fails_beside_leaves_its_pages_and_the_lane_to_others(num_choices: int) -> None:
    drive = beside_drive()
    drive.runner.bad_requests = {"bad"}
    drive.add(make_request("bad", 20, n=num_choices, cache_salt="its own"))
    drive.step()
    drive.runner.set_pace(lambda: True)
    drive.step()
    assert drive.failed.keys() == {"bad"}
    assert not drive.failed["bad"].is_refusal
    drive.add(make_request("good", 20))
    assert [piece.sequence_id[0] for piece in drive.step().beside] == ["good"]
    drive.run()
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_request_that_reuses_an_id_does_not_fail_with_the_slice_of_the_first_one() -> None:
    drive = beside_drive()
    drive.add(make_request("long", 20))
    drive.step()
    drive.abort("long")
    drive.add(make_request("long", 30))
    drive.runner.bad_requests = {"long"}
    drive.runner.set_pace(lambda: True)
    drive.step()
    drive.runner.bad_requests.clear()
    drive.expect_all_answered()


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
