"""Which pieces of a prompt are worth a step while media are missing, and what the prompt waits for then."""

import pytest

from keepsight.scheduling.cut_piece import MIN_TEXT_BEFORE_MEDIA
from keepsight.scheduling.request_state import ParkedFor
from tests.scheduling.drive import TOKENS_PER_PICTURE, Drive, make_config, make_request


@pytest.mark.parametrize("num_known", [0, 8])
@pytest.mark.parametrize(("num_new", "is_begun"), [(MIN_TEXT_BEFORE_MEDIA - 1, False), (MIN_TEXT_BEFORE_MEDIA, True)])
def test_text_before_a_missing_picture_is_computed_if_it_is_worth_a_step(
    num_known: int, num_new: int, is_begun: bool
) -> None:
    drive = Drive(make_config(), delivers=False)
    if num_known:
        drive.run(make_request("first", num_known, max_tokens=1))
    drive.add(make_request("a", num_known + num_new, "cat", 3))
    assert [piece.length for piece in drive.step().now] == ([num_new] if is_begun else [])


def test_a_picture_is_computed_as_soon_as_it_is_encoded_even_if_the_next_is_missing() -> None:
    drive = Drive(make_config(), delivers=False, is_done=lambda: False)
    drive.add(make_request("a", "cat", "dog", 3))
    drive.step()
    drive.deliver("cat")
    drive.step()
    assert [state.parked_for for state in drive.scheduler.lineup.parked] == [ParkedFor.ENCODER]
    drive.runner.set_pace(lambda: True)
    drive.step()
    assert [piece.length for piece in drive.step().now] == [TOKENS_PER_PICTURE]
    drive.step()
    assert [state.parked_for for state in drive.scheduler.lineup.parked] == [ParkedFor.PIXELS]
    drive.deliver("dog")
    drive.expect_all_answered()


@pytest.mark.parametrize("cuts_items", [False, True])
def test_a_step_computes_part_of_a_picture_if_its_tokens_see_no_later_ones(cuts_items: bool) -> None:
    room = TOKENS_PER_PICTURE + 4
    drive = Drive(make_config(max_num_batched_tokens=room, max_num_seqs=1, cuts_items=cuts_items))
    plans = drive.run(make_request("a", 8, "cat", 9, max_tokens=1))
    lengths = [piece.length for plan in plans for piece in plan.now]
    assert lengths == ([room, room, 3] if cuts_items else [8, room, 5])
    drive.expect_right_answers()


def test_where_pictures_may_be_cut_a_step_may_be_smaller_than_one() -> None:
    drive = Drive(make_config(max_num_batched_tokens=2, max_num_seqs=1, cuts_items=True))
    drive.run(make_request("a", 1, "cat", "dog", 1))
    drive.expect_right_answers()
