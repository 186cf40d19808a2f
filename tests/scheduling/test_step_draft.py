"""How a step is divided: the budgets of its lanes, and when waiting prompts make a crowd."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from keepsight.scheduling import step_draft
from keepsight.scheduling.kv_cache_manager import PrefixHit
from keepsight.scheduling.step_draft import Room, room_to_join
from tests.scheduling.drive import TOKENS_PER_PICTURE, Drive, make_config, make_request


def room_beside(num_streams: int, num_waiting: int, **config: Any) -> Room:
    drive = Drive(make_config(**{"max_prompt_tokens_beside_streams": 4, **config}))
    for number in range(num_waiting):
        drive.add(make_request(str(number), 3))
    return room_to_join(drive.config.scheduler, num_streams, drive.scheduler.lineup)


@pytest.mark.parametrize(("num_streams", "least_crowd"), [(1, 3), (5, 3), (6, 4), (7, 4), (20, 11)])
def test_a_crowd_is_three_waiting_requests_and_more_than_half_the_streams(num_streams: int, least_crowd: int) -> None:
    assert not room_beside(num_streams, least_crowd - 1).is_for_all
    assert room_beside(num_streams, least_crowd).is_for_all


@pytest.mark.parametrize("config", [{"max_prompt_tokens_beside_streams": 0}, {"takes_turns": True}], ids=str)
def test_no_crowd_joins_if_the_options_forbid_it(config: dict[str, Any]) -> None:
    assert not room_beside(1, 50, **config).is_for_all


def test_without_streams_or_if_all_join_anyway_there_is_no_bound() -> None:
    rooms = [room_beside(0, 50), room_beside(1, 50, max_prompt_tokens_beside_streams=None)]
    assert [(room.num_tokens, room.is_for_all) for room in rooms] == [(None, True)] * 2


@pytest.mark.parametrize(
    ("usual", "picture", "num_tokens", "num_for_short"),
    [(32, 256, 512, 32), (32, 500, 512, 12), (32, 600, 600, 0), (400, 0, 512, 256), (700, 256, 700, 350)],
)
def test_a_crowd_s_room_is_divided_between_short_and_long_prompts(
    usual: int, picture: int, num_tokens: int, num_for_short: int
) -> None:
    config = {"tokens_per_item": picture, "max_num_encoder_input_tokens": 1000, "max_num_batched_tokens": 1000}
    room = room_beside(1, 3, max_prompt_tokens_beside_streams=usual, **config)
    assert (room.num_tokens, room.num_for_short, room.longest_short) == (num_tokens, num_for_short, usual)


def test_prompts_beside_streams_are_together_no_more_than_a_step_may_have() -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=0, max_num_batched_tokens=40), is_done=lambda: False)
    drive.add(make_request("stream", 3, max_tokens=9, ignore_eos=True))
    drive.step()
    for number in range(3):
        drive.add(make_request(f"{number}", 25, cache_salt=f"{number}"))
    assert [piece.length for piece in drive.step().beside] == [25, 15]


def test_prompts_that_join_streams_have_together_no_more_than_the_streams_leave() -> None:
    config = make_config(max_prompt_tokens_beside_streams=40, max_num_batched_tokens=40, block_size=1, num_blocks=256)
    drive = Drive(config)
    drive.add(make_request("stream", 3, max_tokens=9, ignore_eos=True))
    drive.step()
    for number in range(2):
        drive.add(make_request(f"{number}", 39, cache_salt=f"{number}"))
    assert [piece.length for piece in drive.step().now] == [1, 39]


def test_first_tokens_that_are_recalled_count_as_tokens_of_a_step() -> None:
    drive = Drive(make_config(max_num_batched_tokens=TOKENS_PER_PICTURE, max_num_seqs=1))
    drive.run(make_request("first", 3))
    plans = drive.run(*(make_request(f"{number}", 3, max_tokens=1) for number in range(8)))
    assert [len(plan.recall) for plan in plans] == [6, 2]


# Waiting for room ---------------------------------------------------------------------------------------------


def drive_with_many_who_wait_to_join(num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """One stream runs; one waiting request can join it with each step."""
    monkeypatch.setattr(step_draft, "CROWD_TOKENS", 8)
    drive = Drive(make_config(max_prompt_tokens_beside_streams=8, num_blocks=128))
    drive.add(make_request("stream", 3, max_tokens=90, ignore_eos=True))
    drive.step()
    for number in range(num_waiting):
        drive.add(make_request(f"{number}", 8, cache_salt=f"{number}", max_tokens=1))
    drive.step()
    return drive


def test_not_all_requests_waiting_to_join_are_examined_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_request_waiting_to_join_gets_its_first_token_once_its_prompt_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = drive_with_many_who_wait_to_join(40, monkeypatch)
    drive.add(make_request("urgent", 8, cache_salt="39", max_tokens=1, priority=-1))
    assert drive.step().now[-1].sequence_id[0] == "urgent"
    assert [recall.sequence_id[0] for recall in drive.step().recall] == ["39"]
    drive.expect_all_answered()


def test_a_request_waiting_for_more_room_is_not_overtaken_by_later_ones() -> None:
    drive = Drive(make_config(max_num_batched_tokens=64))
    drive.run(make_request("before", "cat", 1))
    drive.add(make_request("first", 60, cache_salt="first", max_tokens=1))
    drive.add(make_request("picture", 3, "cat", 5, max_tokens=1))
    for number in range(8):
        # Each would leave the next step four tokens short of its full size.
        drive.add(make_request(f"later{number}", 64, cache_salt=f"{number}", max_tokens=1))
        drive.step()
    assert ("picture", 0) in drive.finished
    drive.expect_all_answered()


def test_a_prompt_that_fits_whole_into_the_rest_of_a_step_does_not_wait_behind_one_that_does_not() -> None:
    drive = Drive(make_config(max_num_batched_tokens=64))
    for name, length in (("first", 61), ("waits", 30), ("fits", 3)):
        drive.add(make_request(name, length, cache_salt=name))
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["first", "fits"]
    drive.expect_all_answered()


def test_a_short_beginning_is_computed_if_the_step_has_no_more_room() -> None:
    drive = Drive(make_config(max_num_batched_tokens=13))
    drive.run(make_request("a", 10, "cat", 3))
    drive.expect_right_answers()


# A long prompt and a short one --------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["now", "beside"])
def test_a_question_does_not_wait_for_a_prompt_of_many_steps(lane: str) -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=2, num_blocks=128, max_num_seqs=4))
    if lane == "beside":
        drive.add(make_request("stream", 3, max_tokens=90, ignore_eos=True))
        drive.step()
    drive.add(make_request("book", 300, cache_salt="book"))
    assert [piece.length for piece in getattr(drive.step(), lane)] == [64]
    drive.add(make_request("question", 5, cache_salt="question"))
    assert [(piece.sequence_id[0], piece.length) for piece in getattr(drive.step(), lane)] == [
        ("book", 59),
        ("question", 5),
    ]
    # Nothing else waits now.
    assert [piece.length for piece in drive.step().beside] == [64]
    drive.expect_all_answered()


@pytest.mark.parametrize(("length", "first_piece"), [(5, 5), (40, 32)])
def test_other_books_wait_for_the_first_and_hold_back_no_question(length: int, first_piece: int) -> None:
    drive = Drive(make_config(num_blocks=256, max_num_seqs=4))
    for number in range(3):
        drive.add(make_request(f"book {number}", 300, cache_salt=f"{number}"))
    drive.step()
    drive.add(make_request("question", length))
    planned = [(piece.sequence_id[0], piece.length) for piece in drive.step().now]
    assert planned[:2] == [("book 0", 32), ("question", first_piece)]
    drive.expect_all_answered()


@pytest.mark.parametrize("lane", ["now", "beside"])
def test_what_no_question_takes_goes_to_the_next_book(lane: str) -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=2, num_blocks=512, max_num_seqs=10))
    num_streams = 6 if lane == "beside" else 0  # too many for three prompts to make a crowd
    for number in range(num_streams):
        drive.add(make_request(f"stream {number}", 3, max_tokens=90, ignore_eos=True))
    drive.step()
    for number in range(3):
        drive.add(make_request(f"book {number}", 320, cache_salt=f"{number}", max_tokens=1))
    plans = [drive.step() for _ in range(15)]
    pieces = [[(piece.sequence_id[0], piece.length) for piece in getattr(plan, lane)] for plan in plans]
    assert pieces[0] == [("book 0", 32), ("book 1", 32)]
    assert [sum(length for _, length in each) for each in pieces] == 15 * [64]
    drive.expect_all_answered()


def test_a_question_about_a_known_book_is_as_short_as_what_is_new_of_it() -> None:
    drive = Drive(make_config(num_blocks=512, max_num_seqs=6))
    known = make_request("known", 300, max_tokens=1)
    drive.run(known)
    for number in range(3):
        drive.add(make_request(f"book {number}", 300, cache_salt=f"{number}"))
    drive.step()
    drive.add(replace(make_request("question", 0), token_ids=(*known.token_ids, 20, 21)))
    planned = [(piece.sequence_id[0], piece.length) for piece in drive.step().now]
    assert planned == [("book 0", 32), ("question", 2), ("book 1", 30)]
    drive.expect_all_answered()


def test_what_is_left_of_a_step_takes_no_pages_from_what_is_planned_in_it() -> None:
    drive = Drive(make_config(num_blocks=105, max_num_seqs=6, max_prompt_ends=0))
    for number in range(2):
        drive.add(make_request(f"book {number}", 300, cache_salt=f"{number}"))
    drive.step()
    drive.add(make_request("question", 30, cache_salt="question", max_tokens=20, ignore_eos=True))
    for _ in range(5):
        drive.step()
    assert drive.scheduler.kv_cache.pool.num_free == 4, "too few for the next piece of the second book, too"
    assert [(piece.sequence_id[0], piece.length) for piece in drive.step().now] == [("book 0", 31), ("question", 1)]
    drive.expect_all_answered()


@pytest.mark.parametrize(("num_blocks", "pieces"), [(158, [("book 0", 32), ("book 1", 32)]), (157, [("book 0", 32)])])
def test_the_next_book_begins_only_if_there_are_pages_for_all_of_it_and_of_the_first(
    num_blocks: int, pieces: list[tuple[str, int]]
) -> None:
    drive = Drive(make_config(num_blocks=num_blocks, max_num_seqs=6))
    for number in range(3):
        drive.add(make_request(f"book {number}", 300, cache_salt=f"{number}"))
    assert [(piece.sequence_id[0], piece.length) for piece in drive.step().now] == pieces
    drive.expect_all_answered()


@pytest.mark.parametrize("lane", ["now", "beside"])
def test_a_book_takes_the_whole_rest_of_a_step_if_nothing_else_waits(lane: str) -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=2, num_blocks=128))
    if lane == "beside":
        drive.add(make_request("stream", 3, max_tokens=90, ignore_eos=True))
        drive.step()
    drive.add(make_request("question", 5, cache_salt="question"))
    drive.add(make_request("book", 300, cache_salt="book"))
    assert [piece.length for piece in getattr(drive.step(), lane)] == [5, 59]
    drive.expect_all_answered()


def test_a_book_pauses_where_earlier_prompts_leave_no_more_than_others_need() -> None:
    drive = Drive(make_config(num_blocks=256, max_num_seqs=5))
    drive.add(make_request("stream", 3, max_tokens=90, ignore_eos=True))
    drive.step()
    drive.add(make_request("book", 500, cache_salt="book"))
    drive.step()
    drive.add(make_request("urgent", 64, cache_salt="urgent", priority=-1))
    assert [piece.length for piece in drive.step().now] == [1, 31, 32]
    for name, length in (("question", 5), ("longer question", 60)):
        drive.add(make_request(name, length, cache_salt=name))
    planned = [(piece.sequence_id[0], piece.length) for piece in drive.step().now]
    assert planned == [("urgent", 32), ("stream", 1), ("question", 5), ("longer question", 26)]
    drive.expect_all_answered()


def test_a_longer_question_progresses_by_its_share_of_each_step() -> None:
    drive = Drive(make_config(num_blocks=256, max_num_seqs=4))
    drive.add(make_request("book", 500, cache_salt="book"))
    drive.step()
    drive.add(make_request("question", 40))
    assert [[piece.length for piece in drive.step().now] for _ in range(2)] == [[32, 32], [56, 8]]
    drive.expect_all_answered()


def test_a_book_leaves_nothing_to_those_that_have_no_seat() -> None:
    drive = Drive(make_config(num_blocks=256, max_num_seqs=2))
    drive.add(make_request("stream", 3, max_tokens=90, ignore_eos=True))
    drive.step()
    drive.add(make_request("book", 300, cache_salt="book"))
    drive.step()
    drive.add(make_request("question", 5, cache_salt="question"))
    assert [piece.length for piece in drive.step().now] == [1, 63]
    drive.expect_all_answered()


def test_questions_do_not_wait_where_several_books_end() -> None:
    drive = Drive(make_config(num_blocks=512))
    for number in range(3):
        drive.add(make_request(f"book {number}", 300, cache_salt=f"{number}", max_tokens=1))
    for number in range(30):
        drive.add(make_request(f"question {number}", 30, cache_salt=f"question {number}", max_tokens=1))
        drive.step()
        assert (f"question {number}", 0) in drive.finished
    assert ("book 2", 0) in drive.finished
    drive.expect_all_answered()


@pytest.mark.parametrize("config", [{"takes_turns": True}, {"max_num_batched_tokens": 6 + 8 - 1}], ids=str)
def test_no_room_is_reserved_without_streams_or_if_a_picture_needs_all(config: dict[str, Any]) -> None:
    drive = Drive(make_config(num_blocks=128, **config))
    assert step_draft.tokens_left_by_long(drive.config.scheduler) == 0
