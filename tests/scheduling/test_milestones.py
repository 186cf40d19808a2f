"""Models with recurrent layers: where states are kept, what is computed again from there, and what too few slots do."""

from typing import Any

import pytest

from keepsight.requests import EngineRequest, PromptPin
from keepsight.scheduling.request_state import ParkedFor
from tests.scheduling.drive import Drive, make_config, make_request, with_text


def recurrent(num_state_slots: int = 16, **options: Any) -> Drive:
    return Drive(make_config(**{"num_state_slots": num_state_slots, "cuts_items": True, **options}))


def ask(request_id: str, *parts: int | str, end: int = 0, **options: Any) -> EngineRequest:
    """Make a request whose last part, a text, is filled with the token `end`."""
    request = make_request(request_id, *parts, **options)
    length = parts[-1]
    assert isinstance(length, int)
    token_ids = [token_id for token_id in request.token_ids if token_id != 1]
    return with_text(request, [*token_ids[:-length], *[end] * length])


def spans(drive: Drive, request_id: str) -> list[tuple[int, int]]:
    """Return the slices that were planned for a request's prompt."""
    length = len(drive.requests[request_id].token_ids)
    slices = (piece for plan in drive.runner.plans for piece in (*plan.beside, *plan.now))
    return [(each.start, each.end) for each in slices if each.sequence_id[0] == request_id and each.start < length]


def kept(drive: Drive, request_id: str) -> list[int]:
    """Return the ends after which a request's states were kept."""
    slices = (piece for plan in drive.runner.plans for piece in (*plan.beside, *plan.now))
    return [each.end for piece in slices if piece.sequence_id[0] == request_id for each in piece.kept_states]


# Where states are kept -----------------------------------------------------------------------------------------


def test_a_prompt_keeps_its_states_behind_its_last_picture_and_before_its_last_token_in_one_step() -> None:
    drive = recurrent()
    drive.run(ask("a", 9, "cat", 9))
    assert spans(drive, "a") == [(0, 24)]
    assert kept(drive, "a") == [12, 20]
    drive.expect_right_answers()


def test_a_prompt_in_parts_keeps_what_each_part_reaches() -> None:
    drive = recurrent(max_num_batched_tokens=12)
    drive.run(ask("a", 9, "cat", 9))
    assert spans(drive, "a") == [(0, 12), (12, 24)]
    assert [piece.kept_states[0].end for plan in drive.runner.plans for piece in plan.now if piece.kept_states] == [
        12,
        20,
    ]
    drive.expect_right_answers()


def test_the_same_prompt_again_begins_before_its_last_token() -> None:
    drive = recurrent()
    drive.run(ask("first", 9, "cat", 9))
    plans = drive.run(ask("again", 9, "cat", 9))
    assert len(plans[0].recall) == 1
    # For its second token the answer needs all that is behind the last kept state.
    assert [(piece.start, piece.end) for piece in plans[1].now] == [(20, 25)]
    assert drive.cached["again", 0] == 20
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_the_end_of_a_prompt_is_not_used_without_the_state_before_it() -> None:
    drive = recurrent(num_state_slots=2)
    drive.run(ask("first", 9, "cat", 9))
    drive.run(ask("other", 20, cache_salt="x"))
    plans = drive.run(ask("again", 9, "cat", 9))
    assert not any(plan.recall for plan in plans)
    drive.expect_right_answers()


def test_another_question_begins_behind_the_picture() -> None:
    drive = recurrent()
    drive.run(ask("first", 9, "cat", 9))
    drive.run(ask("other", 9, "cat", 13, end=2))
    assert spans(drive, "other") == [(12, 28)]
    assert kept(drive, "other") == [24]
    assert drive.cached["other", 0] == 12
    assert drive.runner.encoded == ["cat"]
    drive.expect_right_answers()


def test_a_state_that_would_spare_others_less_than_two_blocks_is_not_kept() -> None:
    drive = recurrent()
    drive.run(ask("first", 9, "cat", 9))
    drive.run(ask("short", 9, "cat", 5, end=2), ask("longer", 9, "cat", 6, end=3))
    assert kept(drive, "short") == []
    assert kept(drive, "longer") == [20]


def test_the_end_of_a_prompt_is_kept_only_with_the_state_before_it() -> None:
    drive = recurrent()
    drive.run(ask("first", 9, "cat", 9))
    drive.run(ask("short", 9, "cat", 5, end=2), ask("longer", 9, "cat", 6, end=3))
    kept = [piece.sequence_id[0] for plan in drive.runner.plans for piece in plan.now if piece.keep_as is not None]
    assert kept == ["first", "longer"]


def test_the_next_turn_of_a_conversation_begins_at_the_end_of_the_last_prompt() -> None:
    drive = recurrent()
    first = ask("first", 9, "cat", 9)
    drive.run(first)
    answer = drive.tokens["first", 0]
    turn = EngineRequest("next", (*first.token_ids, *answer, *[2] * 9), first.media, first.sampling_params)
    drive.run(turn)
    assert drive.cached["next", 0] == 20
    drive.expect_right_answers()


def test_a_second_prompt_with_a_common_beginning_keeps_the_state_that_the_third_needs() -> None:
    drive = recurrent()
    for end, name in enumerate(("first", "second", "third"), 2):
        drive.run(ask(name, 20, 12, end=end))
    assert [kept(drive, name) for name in ("first", "second", "third")] == [[28], [20, 28], [28]]
    assert [drive.cached[name, 0] for name in ("first", "second", "third")] == [0, 0, 20]
    drive.expect_right_answers()


def test_what_pins_cover_can_be_found() -> None:
    drive = recurrent()
    drive.run(ask("first", 20, 12, pins=(PromptPin(11, 60.0),)))
    drive.run(ask("other", 20, 12, end=2))
    assert drive.cached["other", 0] == 8


def test_pinned_states_outlive_others() -> None:
    drive = recurrent(num_state_slots=5)
    drive.run(ask("pinned", 20, 2, pins=(PromptPin(20, 60.0),)))
    for number in range(8):
        drive.run(ask(f"other {number}", 20, cache_salt=str(number)))
    drive.run(ask("again", 20, 2))
    assert drive.cached["again", 0] == 20


def test_a_pin_on_what_was_cached_before_holds_the_state_that_the_next_question_keeps() -> None:
    drive = recurrent(num_state_slots=6)
    drive.run(ask("first", 20, 12))
    drive.run(ask("pinner", 20, 12, pins=(PromptPin(20, 600.0),)))
    drive.run(ask("second", 20, 12, end=2))
    for number in range(12):
        drive.run(ask(f"other {number}", 20, cache_salt=str(number)))
    drive.run(ask("third", 20, 12, end=3))
    assert [drive.cached[name, 0] for name in ("pinner", "second", "third")] == [28, 0, 20]
    drive.expect_right_answers()


def test_no_state_is_kept_inside_a_picture_whose_tokens_see_later_ones() -> None:
    drive = recurrent(cuts_items=False, sees_items_whole=True)
    drive.run(ask("a", 9, "cat", 9), ask("b", 10, "dog", 9, cache_salt="b"))
    # The picture of "a" ends inside a block, that of "b" at the end of one.
    assert kept(drive, "a") == [20]
    assert kept(drive, "b") == [16, 24]
    drive.expect_right_answers()


def test_a_state_is_kept_inside_a_picture_that_is_computed_whole_though_its_tokens_see_no_later_ones() -> None:
    drive = recurrent(cuts_items=False)
    drive.run(ask("a", 9, "cat", 9))
    assert kept(drive, "a") == [12, 20]
    drive.run(ask("another question", 9, "cat", 9, end=2))
    assert drive.cached["another question", 0] == 12
    drive.expect_right_answers()


def test_without_prefix_caching_nothing_is_kept() -> None:
    drive = recurrent(caches_prefixes=False)
    for name in ("first", "again"):
        drive.run(ask(name, 9, "cat", 9))
        assert spans(drive, name) == [(0, 24)]
        assert kept(drive, name) == []
    drive.expect_right_answers()


def test_nothing_is_kept_while_an_answer_is_generated() -> None:
    drive = recurrent()
    drive.run(ask("a", 9, max_tokens=30, ignore_eos=True))
    assert drive.scheduler.kv_cache.slots.num_kept == 1


# Together ------------------------------------------------------------------------------------------------------


def test_questions_that_arrive_together_compute_their_picture_once() -> None:
    drive = recurrent()
    drive.run(*(ask(name, 9, "cat", 5, end=end) for end, name in enumerate("abc", 2)))
    assert [spans(drive, name)[0] for name in "abc"] == [(0, 20), (12, 20), (12, 20)]
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_prompts_that_arrive_together_compute_their_common_beginning_twice_and_no_more() -> None:
    drive = recurrent(max_num_batched_tokens=128)
    drive.run(*(ask(name, 20, 12, end=end) for end, name in enumerate("abcd", 2)))
    assert [spans(drive, name)[0] for name in "abcd"] == [(0, 32), (0, 32), (20, 32), (20, 32)]
    drive.expect_right_answers()


@pytest.mark.parametrize("num_others", [1, 3])
def test_a_long_beginning_that_is_being_computed_is_waited_for_and_kept_where_prompts_part(num_others: int) -> None:
    drive = recurrent(num_blocks=200, max_num_batched_tokens=64)
    drive.add(ask("a", 300, 12))
    drive.step()
    drive.run(*(ask(str(number), 300, 12, end=2 + number) for number in range(num_others)))
    assert [spans(drive, str(number))[0] for number in range(num_others)] == [(300, 312)] * num_others
    assert 300 in kept(drive, "a")
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_nobody_waits_for_a_state_with_more_behind_it_in_its_slice_than_it_spares() -> None:
    drive = recurrent(num_blocks=200, max_num_batched_tokens=512)
    drive.add(ask("long", 9, 200, pins=(PromptPin(8, 60.0),)))
    drive.add(ask("short", 9, 19, end=2))
    drive.step()
    assert kept(drive, "long")[0] == 8
    assert [span[0] for span in spans(drive, "short")] == [0]
    drive.expect_all_answered()


def test_nobody_waits_for_a_slice_that_ends_behind_the_common_beginning() -> None:
    # One that is too long leaves half of each step to others: 31 tokens, and the common beginning has 28.
    drive = recurrent(num_blocks=100, max_num_batched_tokens=62)
    drive.add(ask("long", 28, 172))
    drive.add(ask("short", 28, 12, end=2))
    assert [(piece.start, piece.end) for piece in drive.step().now] == [(0, 31), (0, 31)]
    drive.expect_all_answered()


def test_few_slots_do_not_make_many_prompts_compute_their_common_beginning_again() -> None:
    drive = recurrent(num_state_slots=8, num_blocks=400, max_model_len=100, max_num_seqs=32)
    for number in range(40):
        request = ask(str(number), 40, 14, max_tokens=6)
        drive.add(with_text(request, [*request.token_ids[:-14], *[number + 3] * 14]))
    drive.expect_all_answered()
    assert max(len(plan.now) for plan in drive.runner.plans) == 6
    assert [drive.cached[str(number), 0] for number in range(3, 40)] == [40] * 37


def test_nobody_waits_for_a_state_inside_a_picture_whose_tokens_see_later_ones() -> None:
    drive = recurrent(cuts_items=False, sees_items_whole=True, max_num_seqs=2, max_num_batched_tokens=10)
    drive.add(ask("first", 9, "cat", 9))
    drive.add(ask("other", 9, "cat", 9, end=2))
    while drive.scheduler.lineup:
        drive.step()
        assert drive.scheduler.lineup.parked_for(ParkedFor.PREFIX) == []
    drive.expect_right_answers()


def test_a_sequence_with_pages_goes_on_from_a_state_of_another_that_got_further() -> None:
    drive = recurrent(max_num_batched_tokens=64, max_prompt_tokens_beside_streams=None)
    drive.delivers = False
    drive.add(ask("waits", 32, "cat", "dog", 9))
    drive.step()
    drive.step()
    [state] = drive.scheduler.lineup.parked
    assert (state.num_computed, state.parked_for) == (32, ParkedFor.PIXELS)
    drive.deliver("cat")
    drive.deliver("dog")
    drive.add(ask("other", 32, "cat", "dog", 9, priority=-1, end=2))
    drive.run()
    # The other, which is first in line, computed both pictures for the two.
    computed = [span for name in ("waits", "other") for span in spans(drive, name) if span[0] < 44 <= span[1]]
    assert len(computed) == 1
    drive.expect_right_answers()


def test_a_sequence_with_pages_does_not_wait_for_one_that_is_not_as_far() -> None:
    drive = recurrent(max_num_batched_tokens=24)
    drive.delivers = False
    drive.add(ask("waits", 32, "cat", 9))
    drive.step()
    drive.step()
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.add(ask("other", 32, 9, priority=-1, end=2))
    drive.deliver("cat")
    while drive.scheduler.lineup:
        drive.step()
        assert drive.scheduler.lineup.parked_for(ParkedFor.PREFIX) == []
    assert spans(drive, "waits")[:2] == [(0, 24), (24, 36)]
    drive.expect_right_answers()


# Ends and shortages --------------------------------------------------------------------------------------------


def test_where_slots_are_few_the_last_state_is_kept() -> None:
    drive = recurrent(num_state_slots=2)
    drive.run(ask("first", 9, "cat", 9))
    assert kept(drive, "first") == [20]
    drive.run(ask("again", 9, "cat", 9))
    assert drive.cached["again", 0] == 20


def test_no_slot_is_promised_that_one_who_waits_could_begin_with() -> None:
    drive = recurrent(num_state_slots=2, num_blocks=100, max_num_batched_tokens=16)
    drive.add(ask("long", 320, pins=tuple(PromptPin(end, 60.0) for end in range(8, 320, 8))))
    drive.step()
    drive.add(ask("urgent", 12, priority=-1, max_tokens=1, cache_salt="x"))
    drive.step()
    drive.step()
    assert ("urgent", 0) in drive.finished
    assert drive.scheduler.pages.num_preemptions == 0
    drive.expect_all_answered()


def test_nobody_loses_pages_to_one_behind_for_want_of_a_promised_slot() -> None:
    drive = recurrent(num_state_slots=3, num_blocks=100)
    drive.delivers = False
    drive.add(ask("waits", 36, "cat", 9))
    drive.step()
    drive.add(ask("running", 40, cache_salt="x"))
    drive.add(ask("behind", 40, cache_salt="y"))
    drive.step()
    assert drive.scheduler.pages.num_preemptions == 0
    drive.deliver("cat")
    drive.run()
    drive.expect_right_answers()


def test_a_state_is_kept_even_if_its_sequence_ends_before_the_next_step() -> None:
    drive = recurrent()
    drive.add(ask("aborted", 20))
    drive.step()
    drive.abort("aborted")
    assert drive.step().is_empty
    drive.run(ask("again", 20, end=0))
    assert drive.cached["again", 0] == 16
    drive.expect_right_answers()


def test_a_slot_of_an_aborted_sequence_is_free_once_its_slice_beside_has_ended() -> None:
    drive = recurrent(num_state_slots=2, max_prompt_tokens_beside_streams=4)
    drive.add(make_request("stream", 3, max_tokens=40, ignore_eos=True))
    drive.step()
    drive.runner.set_pace(lambda: False)
    drive.add(ask("aborted", 20))
    assert drive.step().beside
    drive.abort("aborted")
    drive.add(ask("short", 4))
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["stream"]
    drive.runner.set_pace(lambda: True)
    drive.step()
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["stream", "short"]
    drive.expect_all_answered()


def test_a_preempted_sequence_begins_again_at_its_last_state() -> None:
    drive = recurrent(num_blocks=16)
    drive.run(
        ask("first", 20, max_tokens=25, ignore_eos=True), ask("second", 20, max_tokens=25, ignore_eos=True, end=2)
    )
    assert drive.scheduler.pages.num_preemptions
    again = [span for span in spans(drive, "second") if span[0] == 16]
    assert len(again) == 1
    drive.expect_right_answers()
    drive.expect_nothing_left()


@pytest.mark.parametrize("num_state_slots", [1, 2, 3])
def test_with_few_slots_few_sequences_run_at_once(num_state_slots: int) -> None:
    drive = recurrent(num_state_slots)
    plans = drive.run(*(ask(str(number), 9, "cat", 9, end=number) for number in range(5)))
    assert max(len({piece.sequence_id for piece in plan.now}) for plan in plans) == num_state_slots
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_more_urgent_sequence_takes_the_last_slot_from_one_that_waits_for_pixels() -> None:
    drive = recurrent(1)
    drive.delivers = False
    drive.add(ask("waits", 32, "cat", 9))
    drive.step()
    assert [piece.sequence_id[0] for piece in drive.step().now] == []
    drive.add(ask("urgent", 20, priority=-1, max_tokens=1))
    drive.step()
    drive.step()
    assert ("urgent", 0) in drive.finished
    drive.deliver("cat")
    drive.expect_all_answered()


def test_forgotten_states_are_not_found() -> None:
    drive = recurrent()
    drive.run(ask("first", 9, "cat", 9))
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.run(ask("again", 9, "cat", 9))
    assert drive.cached["again", 0] == 0
    drive.expect_right_answers()
