"""Guesses come from what followed the same tokens before; they change no answer and no budget."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import TokenOutput
from keepsight.scheduling.guess_tokens import NUM_ALIKE, Guesser, make_guesser
from keepsight.scheduling.step_plan import Slice, StepPlan
from keepsight.testing import LENGTH_OF_ROUND
from tests.scheduling.drive import Drive, make_config, make_request, with_text

NO_END: frozenset[int] = frozenset()
NOTHING = array("I")


def guess(
    *token_ids: int, most: int = 9, ends: frozenset[int] = NO_END, spans: tuple[TokenSpan, ...] = ()
) -> list[int]:
    media = [MediaItem(str(number), span, Geometry(4, 4)) for number, span in enumerate(spans)]
    return list(Guesser(NOTHING, num_right=most).guess(array("I", token_ids), media, ends, most))


def test_the_tokens_that_followed_the_same_tokens_last_time_are_guessed() -> None:
    assert guess(1, 2, 3, 4, 8, 1, 2, 3, 5, 6, 9, 1, 2, 3, most=3) == [5, 6, 9]


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 2, 3), (1, 2, 3, 2, 3), (1, 2, 3, 4, 5, 6, 1, 2)], ids=str)
def test_nothing_is_guessed_if_no_three_tokens_repeat(token_ids: tuple[int, ...]) -> None:
    assert guess(*token_ids) == []


def test_a_repeating_cycle_is_guessed_to_repeat() -> None:
    assert guess(4, 4, 4, 4, most=5) == [4] * 5
    assert guess(1, 2, 1, 2, 1, most=5) == [2, 1, 2, 1, 2]


def test_tokens_are_compared_as_numbers_and_not_as_bytes() -> None:
    last = (1 << 16,) * NUM_ALIKE
    # The bytes of the last three tokens do occur in these, shifted by one.
    shifted = (0, *(1 << 24,) * NUM_ALIKE, 1 << 8)
    assert array("I", shifted).tobytes().find(array("I", last).tobytes()) == 5
    assert guess(*shifted, *last) == []
    assert guess(*last, 5, *shifted, *last, most=1) == [5]


def test_no_end_of_an_answer_is_guessed() -> None:
    token_ids = (1, 2, 3, 4, 7, 5, 1, 2, 3)
    assert guess(*token_ids) == [4, 7, 5, 1, 2, 3, 4, 7, 5]
    assert guess(*token_ids, ends=frozenset({7})) == [4]
    assert guess(*token_ids, ends=frozenset({4})) == []


def test_media_tokens_are_not_guessed() -> None:
    token_ids = (1, 2, 3, 4, 0, 0, 5, 1, 2, 3)
    assert guess(*token_ids, spans=(TokenSpan(4, 2),)) == [4]
    assert guess(*token_ids, spans=(TokenSpan(3, 3),)) == []
    assert guess(*token_ids, spans=(TokenSpan(0, 3),)) == guess(*token_ids)
    assert guess(*token_ids, spans=(TokenSpan(0, 5),)) == []


@given(
    token_ids=st.lists(st.sampled_from([0, 1, 2, 256, 1 << 24]), max_size=40),
    most=st.integers(0, 12),
    ends=st.sets(st.sampled_from([2, 256])).map(frozenset),
    span=st.none() | st.builds(TokenSpan, st.integers(0, 30), st.integers(1, 6)),
)
def test_guesses_equal_those_of_a_search_of_every_position(
    token_ids: list[int], most: int, ends: frozenset[int], span: TokenSpan | None
) -> None:
    expected: list[int] = []
    places = [place for place in range(len(token_ids) - NUM_ALIKE) if _are_alike(token_ids, place)]
    if places:
        at = places[-1] + NUM_ALIKE
        around = len(token_ids) - at
        for number in range(most):
            place = at + number % around
            if token_ids[place] in ends or (span is not None and span.start <= at + number and at < span.end):
                break
            expected.append(token_ids[place])
    assert guess(*token_ids, most=most, ends=ends, spans=() if span is None else (span,)) == expected


def _are_alike(token_ids: list[int], place: int) -> bool:
    return token_ids[place : place + NUM_ALIKE] == token_ids[-NUM_ALIKE:]


def test_more_correct_guesses_lead_to_longer_guesses() -> None:
    guesser, around, numbers = Guesser(NOTHING), array("I", [1] * 20), []
    for num_right in (1, 3, 7, 2, 0, 0, 1):
        numbers.append(len(guesser.guess(around, (), NO_END, 99)))
        guesser.note_drawn(num_right + 1)
    assert numbers == [3, 3, 7, 15, 5, 1, 1]
    guesser.guess(array("I", range(20)), (), NO_END, 99)  # nothing
    guesser.note_drawn(1)
    assert len(guesser.guess(around, (), NO_END, 99)) == 3


def test_a_copied_text_is_continued_from_its_source_and_not_from_the_last_match() -> None:
    # The page contains the same three tokens twice, and follows a copy of itself.
    page = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7]
    guesser, guessed = Guesser(NOTHING), list[int]()
    for number in range(NUM_ALIKE, len(page)):
        guessed += guesser.guess(array("I", [*page, 0, *page[:number]]), (), NO_END, 1)
        guesser.note_drawn(1 + (guessed[-1] == page[number]))
    assert guessed == [6, *page[NUM_ALIKE + 1 :]]


# Steps ------------------------------------------------------------------------------------------------------------


def guesses_of(plan: StepPlan) -> list[Slice]:
    return [piece for piece in plan.now if piece.guess is not None]


def answer_of(*, max_tokens: int = 60, **config: Any) -> tuple[Drive, list[StepPlan]]:
    drive = Drive(make_config(**config))
    return drive, drive.run(make_request("one", 9, max_tokens=max_tokens, ignore_eos=True))


def test_right_guesses_save_steps_and_the_answer_is_the_same() -> None:
    (plainly, steps), (guessing, fewer) = answer_of(), answer_of(guess_up_to=8)
    assert not any(map(guesses_of, steps))
    assert len(steps) == 60
    assert len(fewer) < 55
    assert guessing.tokens == plainly.tokens
    guessing.expect_all_answered()


def test_guesses_fill_a_step_and_no_more() -> None:
    drive = Drive(make_config(guess_up_to=5))
    plans = drive.run(
        *(make_request(str(each), 9 + each, max_tokens=60, ignore_eos=True, seed=each) for each in range(3))
    )
    assert max(len(plan.now) for plan in plans if guesses_of(plan)) == 5
    drive.expect_all_answered()


def test_a_step_that_computes_as_much_already_is_not_filled() -> None:
    drive = Drive(make_config(guess_up_to=8))
    drive.add(make_request("one", 9, max_tokens=60, ignore_eos=True))
    while not guesses_of(drive.step()):
        pass
    drive.add(make_request("prompt", 8, cache_salt="other"))
    plan = drive.step()
    assert [piece.length for piece in plan.now] == [1, 8]


def test_guesses_take_no_tokens_of_a_step_from_prompts() -> None:
    drive = Drive(make_config(guess_up_to=40, max_num_batched_tokens=12, max_num_seqs=2))
    drive.add(make_request("one", 9, max_tokens=60, ignore_eos=True))
    while not guesses_of(drive.step()):
        pass
    drive.add(make_request("prompt", 30, cache_salt="other"))
    assert [piece.length for piece in drive.step().now] == [1, 11]
    drive.expect_all_answered()


def test_guesses_take_no_pages() -> None:
    # With so few blocks, the later sequences take no pages ahead.
    drive = Drive(make_config(guess_up_to=8, num_blocks=12, block_size=4, max_model_len=48))
    others = [make_request(str(each), 9, max_tokens=30, ignore_eos=True, cache_salt=str(each)) for each in range(3)]
    for plan in drive.run(*others):
        for piece in guesses_of(plan):
            assert not piece.new_block_ids
            assert piece.end <= piece.first_block * 4
    drive.expect_all_answered()


def test_no_guess_lies_beyond_an_answer_s_last_token() -> None:
    for max_tokens in range(20, 40):
        drive, plans = answer_of(max_tokens=max_tokens, guess_up_to=8)
        assert len(drive.tokens["one", 0]) == max_tokens
        assert max(piece.end for plan in plans for piece in plan.now) < 9 + max_tokens
    assert LENGTH_OF_ROUND + NUM_ALIKE < 20  # so that something was guessed


def test_blocks_of_correct_guesses_are_found_by_the_next_turn() -> None:
    drive, _ = answer_of(guess_up_to=8)
    first = drive.requests["one"]
    conversation = (*first.token_ids, *drive.tokens["one", 0])
    drive.run(replace(first, request_id="again", token_ids=(*conversation, 20, 21)))
    assert drive.cached["again", 0] == len(conversation) - 1
    drive.expect_all_answered()


# Predicted outputs ------------------------------------------------------------------------------------------------


def test_a_predicted_answer_takes_few_steps_and_is_the_same() -> None:
    drive, steps = answer_of(max_tokens=40)
    answer = drive.tokens["one", 0]
    again = Drive(make_config(guess_up_to=8))
    fewer = again.run(make_request("one", 9, max_tokens=40, ignore_eos=True, predicted=tuple(answer)))
    assert again.tokens == drive.tokens
    assert len(steps) == 40
    # Three guesses, then seven at a time; the first and the last token come by themselves.
    assert len(fewer) == 1 + 1 + 5
    again.expect_right_answers()


@pytest.mark.parametrize("prompt", [1, 2, 9])
def test_a_prediction_that_is_wrong_in_parts_is_followed_where_it_is_right(prompt: int) -> None:
    drive, config = Drive(make_config()), make_config(guess_up_to=8)
    drive.run(make_request("one", prompt, max_tokens=50, ignore_eos=True))
    answer = drive.tokens["one", 0]
    for predicted in (
        [*answer[:20], 48, *answer[21:]],
        [*answer[:20], *answer[25:]],
        [*answer[:20], 48, 49, *answer[20:]],
        [48],
    ):
        again = Drive(config)
        plans = again.run(make_request("one", prompt, max_tokens=50, ignore_eos=True, predicted=tuple(predicted)))
        assert again.tokens == drive.tokens
        assert len(plans) < 30 or predicted == [48]


def test_a_prediction_goes_before_what_the_prompt_repeats() -> None:
    request = with_text(make_request("one", 8, predicted=(40, 41, 42)), [1, 2, 3, 9, 8, 1, 2, 3])
    guesser, tokens = make_guesser(request), array("I", (*request.token_ids, 40))
    assert list(guesser.guess(tokens[:-1], (), NO_END, 9)) == [40, 41, 42]
    assert list(guesser.guess(tokens, (), NO_END, 9)) == [41, 42]


def test_after_a_prediction_ends_nothing_is_guessed_from_the_prompt() -> None:
    request = make_request("one", 9, predicted=(40, 41))
    guesser, tokens = make_guesser(request), array("I", (*request.token_ids, 40))
    assert list(guesser.guess(tokens, (), NO_END, 9)) == [41]
    tokens.append(41)
    assert list(guesser.guess(tokens, (), NO_END, 9)) == []


def test_each_output_reports_how_many_tokens_were_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    drive, _ = answer_of(max_tokens=40)
    again, reported = Drive(make_config(guess_up_to=8)), list[int]()
    note = again._note

    def listen(output: object) -> None:
        assert isinstance(output, TokenOutput)
        reported.append(output.num_guessed)
        note(output)

    monkeypatch.setattr(again, "_note", listen)
    plans = again.run(make_request("one", 9, max_tokens=40, ignore_eos=True, predicted=tuple(drive.tokens["one", 0])))
    # A step's tokens but the last were guessed. A caller may stop at any token, so each reports guesses up to it.
    expected, num_guessed = [0], 0
    for plan in plans[1:]:
        num_right = len(guesses_of(plan))
        expected += [*range(num_guessed + 1, num_guessed + num_right + 1), num_guessed + num_right]
        num_guessed += num_right
    assert reported == expected
    assert reported[-1] == 40 - len(plans)
