"""Which request is asked for pixels, whose pixels come unasked, and what happens to pixels that are not needed."""

import itertools
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.requests import EngineRequest, MediaNeeded
from keepsight.sampling_params import SamplingParams
from keepsight.scheduling.request_state import RequestState
from tests.scheduling.drive import TOKENS_PER_PICTURE, Drive, make_config, make_request
from tests.scheduling.long_run import thorough


def quiet_drive(**config: Any) -> Drive:
    """Tests deliver its pixels themselves."""
    return Drive(make_config(**config), delivers=False)


def promising(request_id: str, *parts: int | str, **options: Any) -> EngineRequest:
    """A request that promises all its pictures."""
    coming = tuple(dict.fromkeys(part for part in parts if isinstance(part, str)))
    return make_request(request_id, *parts, coming_media=coming, **options)


def step_with(drive: Drive, *requests: EngineRequest) -> None:
    for request in requests:
        assert drive.add(request) is None
    drive.step()


# Promises -----------------------------------------------------------------------------------------------------


def test_promised_pixels_are_not_asked_for() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat", "dog", 2))
    drive.deliver("cat")
    drive.deliver("dog")
    drive.expect_all_answered()
    assert drive.needed == []


def test_pixels_that_were_not_promised_are_still_asked_for() -> None:
    drive = quiet_drive()
    step_with(drive, make_request("a", 3, "cat", "dog", 2, coming_media=("cat",)))
    assert drive.needed == [("a", "dog")]


def test_pixels_may_arrive_before_the_first_step_that_could_need_them() -> None:
    drive = quiet_drive()
    drive.add(promising("a", 3, "cat"))
    assert drive.deliver("cat")
    drive.expect_all_answered()
    assert drive.needed == []


def test_other_requests_rely_on_a_promise_and_are_asked_when_it_ends() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat"), make_request("b", 4, "cat"), make_request("c", 5, "cat"))
    assert drive.needed == []
    drive.scheduler.abort("a")
    drive.step()
    assert drive.needed == [("b", "cat")]
    drive.deliver("cat")
    drive.expect_all_answered()


def test_a_promise_goes_with_the_last_choice_and_not_before() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat", n=2), make_request("b", 4, "cat"))
    drive.scheduler.abort("a", 0)
    drive.step()
    assert drive.needed == []
    drive.scheduler.abort("a", 1)
    drive.step()
    assert drive.needed == [("b", "cat")]


def test_all_choices_share_one_arrival() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat", 2, n=3))
    drive.deliver("cat")
    drive.expect_all_answered()
    assert drive.runner.encoded == ["cat"]
    assert drive.needed == []


def test_when_one_of_two_promising_requests_leaves_the_other_promise_holds() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat"), promising("b", 4, "cat"))
    drive.scheduler.abort("a")
    drive.step()
    assert drive.needed == []
    drive.deliver("cat")
    drive.expect_all_answered()


def test_the_second_arrival_of_two_promises_is_not_kept_after_its_request() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat"), promising("b", 4, "cat"))
    assert drive.deliver("cat")
    assert not drive.deliver("cat"), "they are here"
    drive.step()  # encoded: the pixels go
    drive.step()
    drive.deliver("cat")
    drive.expect_all_answered()
    assert drive.runner.encoded == ["cat"]


def test_pixels_that_come_again_before_the_runner_was_told_to_drop_them_stay() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat"))
    assert drive.deliver("cat")
    drive.scheduler.abort("a")
    assert drive.add(promising("b", 4, "cat")) is None
    assert drive.deliver("cat")
    drive.expect_all_answered()


def test_a_promise_is_good_for_one_arrival() -> None:
    """Once used, dropped and needed again, they are asked for as usual."""
    drive = quiet_drive(shares_embeddings=False, caches_prefixes=False)
    step_with(drive, promising("a", 3, "cat", 2, n=2, max_tokens=9))
    drive.deliver("cat")
    drive.step()
    assert drive.runner.encoded == ["cat"]
    step_with(drive, make_request("b", 3, "cat"))
    assert drive.needed == [("b", "cat")]
    drive.deliver("cat")
    drive.expect_all_answered()


def test_a_request_preempted_after_its_promised_pixels_were_dropped_asks_for_them() -> None:
    drive = quiet_drive(num_blocks=12, caches_prefixes=False, shares_embeddings=False)
    step_with(drive, promising("b", 3, "cat", max_tokens=20, ignore_eos=True, priority=1))
    drive.deliver("cat")
    drive.step()
    step_with(drive, make_request("a", 6, max_tokens=24, ignore_eos=True))
    for _ in range(40):
        drive.step()
        if drive.needed:
            break
    assert drive.scheduler.pages.num_preemptions
    assert drive.needed == [("b", "cat")]
    drive.deliver("cat")
    drive.expect_all_answered()


@pytest.mark.parametrize("resets_prefix", [False, True])
def test_unneeded_promised_pixels_are_kept_to_the_end_of_their_request_at_most(resets_prefix: bool) -> None:
    """The engine holds the prefix, or at least the embeddings, and the frontend did not know."""
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat", 9))
    drive.deliver("cat")
    drive.run()
    drive.scheduler.reset(prefix=resets_prefix, encoder=False)
    step_with(drive, promising("b", 3, "cat", 9))
    drive.deliver("cat")
    drive.expect_all_answered()
    assert drive.runner.encoded == ["cat"]
    assert drive.needed == []
    assert not drive.deliver("cat"), "nobody is left"


def test_pixels_that_arrive_after_their_promiser_left_are_refused() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat"))
    drive.scheduler.abort("a")
    assert not drive.deliver("cat")
    drive.expect_nothing_left()


def test_a_promise_of_pixels_already_here_is_not_relied_on() -> None:
    """Pixels that are here may have been sent before the promise was given, so nothing more would come."""
    drive = quiet_drive()
    step_with(drive, make_request("a", 3, "dog", "cat"))
    drive.deliver("cat")
    drive.add(promising("b", 4, "cat", max_tokens=30, ignore_eos=True))
    drive.deliver("dog")
    while len(drive.runner.encoded) < 2:
        drive.step()
    drive.scheduler.reset(prefix=True, encoder=True)
    step_with(drive, make_request("c", 5, "cat"))
    drive.step()  # until their users release the forgotten embeddings
    assert drive.needed[-1] == ("c", "cat")


def test_a_promise_of_media_that_are_not_its_own_is_ignored() -> None:
    drive = quiet_drive()
    step_with(drive, make_request("a", 3, coming_media=("cat",)), make_request("b", 4, "cat"))
    assert drive.needed == [("b", "cat")]
    drive.deliver("cat")
    drive.expect_all_answered()


# Asking once --------------------------------------------------------------------------------------------------


def test_a_request_is_not_asked_again_because_one_of_its_choices_left() -> None:
    drive = quiet_drive()
    step_with(drive, make_request("a", 3, "cat", n=2))
    drive.scheduler.abort("a", 0)
    drive.step()
    assert drive.needed == [("a", "cat")]
    drive.deliver("cat")
    drive.expect_all_answered()


def drive_that_asked_one_who_left_with_a_slice_under_way() -> Drive:
    drive = quiet_drive(max_prompt_tokens_beside_streams=1)
    drive.runner.set_pace(lambda: False)
    step_with(drive, make_request("stream", 3, max_tokens=60, ignore_eos=True))
    step_with(drive, make_request("left", 40, "cat", 3))
    assert drive.needed == [("left", "cat")]
    assert any(state.is_under_way for state in drive.scheduler.lineup.running)
    drive.scheduler.abort("left")
    return drive


def test_an_aborted_request_with_a_slice_in_progress_is_not_relied_on() -> None:
    drive = drive_that_asked_one_who_left_with_a_slice_under_way()
    step_with(drive, make_request("b", "cat", 2))
    assert drive.needed == [("left", "cat"), ("b", "cat")]
    assert drive.lose("cat") == [MediaNeeded("b", ("cat",), inline=True)]
    drive.deliver("cat")
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_pixels_of_an_aborted_request_with_a_slice_in_progress_are_refused() -> None:
    drive = drive_that_asked_one_who_left_with_a_slice_under_way()
    assert drive.lose("cat") == []
    assert not drive.deliver("cat")
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


# Waiting for room ---------------------------------------------------------------------------------------------


def drive_with_a_queue(num_requests: int, num_pictures: int = 1, **config: Any) -> Drive:
    """Each request has its own picture with its pixels; those that there is room for are being encoded."""
    drive = Drive(make_config(num_pictures=num_pictures, **config), is_done=lambda: False)
    for number in range(num_requests):
        drive.add(make_request(f"{number}", f"picture {number}", 3, max_tokens=1))
    drive.step()
    drive.step()
    being_encoded = [each.media_hash for each in drive.runner.plans[-1].encode]
    assert being_encoded == [f"picture {number}" for number in range(num_pictures)]
    return drive


def ready_to_retry(drive: Drive) -> list[str]:
    return [state.request.request_id for state in drive.scheduler.media.ready_to_retry()]


@pytest.mark.parametrize(("num_pictures", "encoded", "fitting"), [(1, ["0"], ["1"]), (2, ["0", "1"], ["2", "3"])])
def test_of_many_waiting_for_the_encoder_only_those_that_fit_try_again(
    num_pictures: int, encoded: list[str], fitting: list[str]
) -> None:
    drive = drive_with_a_queue(20, num_pictures)
    assert ready_to_retry(drive) == fitting[:1]
    drive.runner.set_pace(lambda: True)
    drive.step()
    assert ready_to_retry(drive) == [*encoded, *fitting[:1]]
    drive.step()  # computes those that were encoded, so their room is free
    assert ready_to_retry(drive) == fitting
    drive.expect_all_answered()
    assert drive.runner.encoded == [f"picture {number}" for number in range(20)]


def test_a_request_that_needs_no_room_tries_again_with_those_that_do() -> None:
    drive = drive_with_a_queue(4, shares_embeddings=False)
    drive.add(make_request("wants the second's", "picture 1", 5, max_tokens=1))
    drive.step()
    drive.runner.set_pace(lambda: True)
    while drive.runner.encoded != ["picture 0", "picture 1"]:
        drive.step()
    # Its pixels were dropped after the same picture was encoded for another request.
    assert "wants the second's" in ready_to_retry(drive)
    drive.expect_all_answered()


def test_a_request_whose_picture_is_being_encoded_for_another_needs_no_room() -> None:
    drive = drive_with_a_queue(3)
    drive.add(make_request("wants the second's", "picture 1", 5, max_tokens=1))
    drive.step()
    drive.runner.set_pace(lambda: not drive.runner.encoded)
    while not drive.scheduler.media.encoder_cache.can_find("picture 1"):
        drive.step()
    assert ready_to_retry(drive) == ["2", "wants the second's"]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_a_request_waiting_for_an_encoding_tries_again_only_when_it_is_done() -> None:
    drive = drive_with_a_queue(1)
    for number in range(20):
        drive.add(make_request(f"wants it too {number}", number + 1, "picture 0", max_tokens=1))
    drive.step()
    drive.scheduler.abort("0")
    assert ready_to_retry(drive) == []
    drive.runner.set_pace(lambda: True)
    while not drive.scheduler.media.encoder_cache.is_ready("picture 0"):
        drive.step()
    assert len(ready_to_retry(drive)) == 20
    drive.expect_all_answered()
    assert drive.runner.encoded == ["picture 0"]


# Turns --------------------------------------------------------------------------------------------------------


def frames(film: str, count: int) -> list[str]:
    return [f"{film} {number}" for number in range(count)]


def film_drive(num_pictures: int = 100, **config: Any) -> Drive:
    """The encoder is given two items at a time, and has two of a film of twelve that came first."""
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 3, "cuts_items": True, **config}
    drive = Drive(make_config(num_blocks=400, num_pictures=num_pictures, **settings), is_done=lambda: False)
    drive.add(make_request("film", *frames("film", 12), 3, max_tokens=1))
    drive.step()
    assert [each.media_hash for each in drive.step().encode] == ["film 0", "film 1"]
    return drive


def claimed(drive: Drive) -> dict[str, int]:
    """Return how many items each request has room for."""
    lineup = drive.scheduler.lineup
    return {each.request.request_id: len(each.claimed_items) for each in (*lineup.unseated(), *lineup.running)}


def test_a_picture_is_encoded_before_the_rest_of_the_film_that_came_earlier() -> None:
    drive = film_drive()
    drive.add(make_request("question", "picture", 3, max_tokens=1))
    drive.step()
    drive.step()
    assert claimed(drive) == {"film": 12, "question": 1}
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert drive.runner.encoded.index("picture") == 2


def test_all_choices_of_a_film_together_have_one_turn() -> None:
    drive = film_drive()
    drive.add(make_request("choices", *frames("other", 5), 3, max_tokens=1, n=3))
    drive.add(make_request("question", "picture", 3, max_tokens=1))
    drive.step()
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert drive.runner.encoded[2:4] == ["picture", "other 0"]


@pytest.mark.parametrize("num_pictures", [4, 8, 20])
def test_a_picture_behind_a_book_does_not_wait_for_its_end(num_pictures: int) -> None:
    drive = Drive(make_config(num_blocks=400, num_pictures=num_pictures, max_num_batched_tokens=24, cuts_items=True))
    drive.add(make_request("book", *frames("page", 60), 3, max_tokens=1))
    for _ in range(5):
        drive.step()
    drive.add(make_request("question", 5, "picture", 3, max_tokens=1))
    while "question" in claimed(drive):
        drive.step()
    assert len(drive.runner.encoded) < 40
    drive.expect_all_answered()


@pytest.mark.parametrize("num_pictures", [4, 8, 20])
def test_of_several_books_each_page_is_encoded_once_however_few_the_cache_holds(num_pictures: int) -> None:
    drive = Drive(make_config(num_blocks=800, num_pictures=num_pictures, cuts_items=True))
    books = [frames(name, 30) for name in ("one", "two", "three", "four")]
    for book in books:
        drive.add(make_request(book[0], *book, 3, max_tokens=1))
    drive.expect_all_answered()
    assert sorted(drive.runner.encoded) == sorted(page for book in books for page in book)


def test_room_is_granted_in_the_usual_order_whoever_has_the_turn() -> None:
    drive = film_drive(num_pictures=12)
    drive.add(make_request("question", "picture", 3, max_tokens=1))
    drive.step()
    drive.step()
    assert claimed(drive) == {"film": 12, "question": 0}
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_a_claim_not_yet_given_returns_its_room_when_its_request_leaves() -> None:
    drive = film_drive(num_pictures=12)
    drive.add(make_request("other", *frames("other", 10), 3, max_tokens=1))
    drive.step()
    drive.step()
    drive.abort("film")
    assert drive.step().unwanted == ["film 0", "film 1"]
    assert claimed(drive) == {"other": 4}, "as many as their pixels had found room beside the film's"
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert drive.runner.encoded == frames("other", 10)


def test_room_taken_from_a_claim_not_yet_given_is_free_at_once_and_pixels_stay() -> None:
    drive = film_drive(num_pictures=12)
    drive.add(make_request("urgent", *frames("other", 10), 3, max_tokens=1, priority=-1))
    drive.step()
    drive.step()
    assert claimed(drive) == {"film": 0, "urgent": 4}, "as many pixels as found room beside the film's"
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert drive.runner.encoded[:6] == [*frames("film", 2), *frames("other", 4)]
    assert sorted(drive.runner.encoded) == sorted([*frames("film", 12), *frames("other", 10)])
    assert len(drive.needed) == 22, "asked for once"


def test_an_item_claimed_by_two_is_encoded_even_if_one_of_them_leaves() -> None:
    drive = film_drive()
    drive.add(make_request("same", *frames("film", 12), 5, max_tokens=1))
    drive.step()
    drive.abort("film")
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert drive.runner.encoded == frames("film", 12)


def test_a_request_for_one_moment_of_a_waiting_film_lends_it_its_turn() -> None:
    drive = film_drive()
    drive.add(make_request("moment", 5, "film 11", 3, max_tokens=1))
    drive.step()
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert drive.runner.encoded == [*frames("film", 2), "film 11", *frames("film", 11)[2:]]


def test_an_item_forgotten_before_it_is_given_is_made_for_its_claims() -> None:
    drive = film_drive()
    drive.scheduler.reset(prefix=True, encoder=True)
    drive.add(make_request("same", *frames("film", 12), 5, max_tokens=1))
    drive.step()
    assert claimed(drive) == {"film": 12, "same": 0}
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_with_room_for_one_picture_no_request_waits_forever_for_a_turn() -> None:
    config = make_config(num_pictures=0, shares_embeddings=False, max_num_encoder_input_tokens=6, max_num_seqs=3)
    drive = Drive(config, is_done=lambda: False)
    for request in (
        make_request("first", "cat", 3),
        make_request("long", "dog", "owl", 2),
        make_request("short", "elk", 2),
    ):
        step_with(drive, request)
        drive.step()
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


# Stale handles ------------------------------------------------------------------------------------------------


def test_after_a_stale_handle_the_longest_waiting_request_is_asked_for_inline_pixels() -> None:
    drive = quiet_drive()
    step_with(drive, make_request("a", 3, "cat"), make_request("b", 4, "cat"))
    assert drive.lose("cat") == [MediaNeeded("a", ("cat",), inline=True)]
    drive.step()
    assert drive.needed == [("a", "cat")] * 2, "asked once more in vain"
    drive.deliver("cat")
    drive.expect_all_answered()


def test_after_stale_handles_together_one_request_is_asked_for_all_pixels_at_once() -> None:
    drive = quiet_drive()
    step_with(drive, make_request("a", 3, "cat", "dog", "cow"), make_request("b", "bee", 4, "dog"))
    first, second = drive.lose("dog", "cow", "bee", "cat")
    assert first == MediaNeeded("a", ("dog", "cow", "cat"), inline=True)
    assert second == MediaNeeded("b", ("bee",), inline=True)
    for media_hash in ("cat", "dog", "cow", "bee"):
        drive.deliver(media_hash)
    drive.expect_all_answered()


def test_after_a_stale_handle_requests_that_do_not_wait_yet_are_not_asked() -> None:
    drive = quiet_drive()
    drive.add(promising("a", 3, "cat"))
    assert drive.lose("cat") == []
    drive.step()
    assert drive.needed == [("a", "cat")], "the promise was used up"


def test_a_stale_handle_after_all_requests_left_is_ignored() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat"))
    drive.scheduler.abort("a")
    assert drive.lose("cat") == []


def test_if_the_request_asked_for_inline_pixels_leaves_the_next_is_asked() -> None:
    drive = quiet_drive()
    step_with(drive, promising("a", 3, "cat"), make_request("b", 4, "cat"))
    drive.lose("cat")
    drive.scheduler.abort("a")
    drive.step()
    assert drive.needed == [("a", "cat"), ("b", "cat")]
    drive.deliver("cat")
    drive.expect_all_answered()


# Unreadable pixels --------------------------------------------------------------------------------------------


def test_all_requests_that_wait_for_unreadable_pixels_end_and_no_other_is_asked_in_vain() -> None:
    drive = quiet_drive()
    step_with(drive, make_request("a", 3, "cat", n=2), make_request("b", 4, "cat"), make_request("c", 5, "dog"))
    assert drive.give_up("cat") == ["a", "b"]
    drive.step()
    assert drive.needed == [("a", "cat"), ("c", "dog")]
    drive.deliver("dog")
    drive.expect_all_answered()


def test_a_request_that_does_not_wait_yet_for_unreadable_pixels_is_asked_for_them() -> None:
    drive = quiet_drive()
    drive.add(promising("a", 3, "cat"))
    assert drive.give_up("cat") == []
    drive.step()
    assert drive.needed == [("a", "cat")], "the promise was used up"
    drive.deliver("cat")
    drive.expect_all_answered()


@pytest.mark.parametrize("has_tiers", [False, True])
def test_a_waiting_request_is_not_compared_with_all_that_wait_for_the_same(
    has_tiers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compared = 0

    def count_and_compare(one: object, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return one is other

    monkeypatch.setattr(RequestState, "__eq__", count_and_compare)
    drive = Drive(make_config(max_num_seqs=4, num_pictures=40, has_tiers=has_tiers), delivers=False, loads=False)
    num_requests, pictures = 30, [f"picture {number}" for number in range(8)]
    for number in range(num_requests):
        drive.add(make_request(str(number), number + 1, *pictures))
    num_compared = 0
    for picture in pictures:
        drive.step()
        drive.end_load(picture, is_late=True)
        drive.step()
        drive.deliver(picture)
    assert num_compared < num_requests * len(pictures)


def test_an_item_waiting_to_be_encoded_is_not_encoded_after_its_request_left() -> None:
    drive = Drive(make_config(takes_turns=True, max_num_batched_tokens=16, max_num_seqs=4))
    drive.add(make_request("text", 60, max_tokens=1))
    drive.step()
    drive.add(make_request("left", 2, "cat", "dog", 2))
    while not drive.scheduler.media.encodings.are_waiting:
        drive.step()
    drive.scheduler.abort("left")
    drive.run()
    assert drive.runner.encoded == []
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_room_of_an_encoding_that_was_left_out_goes_to_those_that_wait() -> None:
    drive = drive_with_a_queue(1)
    drive.scheduler.abort("0")
    drive.add(make_request("next", "dog", 3, max_tokens=1))
    for _ in range(3):
        drive.step()
    assert claimed(drive) == {"next": 0}
    drive.runner.set_pace(lambda: True)
    drive.run()
    assert drive.runner.encoded == ["dog"]
    drive.expect_nothing_left()


# Room ---------------------------------------------------------------------------------------------------------


def with_lengths(
    request_id: str, *lengths: int, priority: int = 0, shares: bool = False, leaves_out: bool = False
) -> EngineRequest:
    """Items of these lengths, in order; if it `shares` them, they equal other requests' items of the same length."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    media = tuple(
        MediaItem(f"{length}" if shares else f"{request_id}-{start}", TokenSpan(start, length), Geometry(4, 4))
        for start, length in zip(starts, lengths, strict=True)
    )
    params = SamplingParams(temperature=0, max_tokens=2)
    unsent = tuple({item.media_hash: None for item in media}) if leaves_out else ()
    return EngineRequest(request_id, (1,) * sum(lengths) + (30,), media, params, priority, unsent_media=unsent)


@pytest.mark.parametrize("steps_per_encoding", [2, 3, 4])
def test_small_items_do_not_for_ever_take_the_room_that_a_larger_one_before_them_waits_for(
    steps_per_encoding: int,
) -> None:
    steps = itertools.count()
    drive = Drive(
        make_config(num_pictures=1, shares_embeddings=False), is_done=lambda: next(steps) % steps_per_encoding == 0
    )
    for number in range(4):
        drive.add(with_lengths(f"small{number}", 1, 1, 1))
    for _ in range(3):
        drive.step()
    drive.run(with_lengths("large", 6, 6, priority=-1), max_steps=100)
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_a_request_that_leaves_keeps_no_room_from_those_behind_it() -> None:
    drive = Drive(make_config(num_pictures=1), is_done=lambda: False)
    for name, length in (("first", 3), ("large", 6), ("small", 2)):
        drive.add(with_lengths(name, length))
    for _ in range(3):
        drive.step()
    assert claimed(drive) == {"first": 1, "large": 0, "small": 0}
    drive.abort("large")
    drive.step()
    assert claimed(drive) == {"first": 1, "small": 1}


def test_shorter_items_that_keep_coming_do_not_take_the_encoder_s_budget_from_a_longer_one_before_them() -> None:
    steps = itertools.count()
    # Three of the shorter fit at once; beside two of them the longer does not.
    config = make_config(max_num_encoder_input_tokens=13, num_pictures=40, max_num_seqs=4)
    drive = Drive(config, is_done=lambda: next(steps) % 2 == 0)
    numbers = itertools.count()

    def step_among_shorter() -> None:
        while len(drive.requests) - len(drive.finished) < 12:
            drive.add(with_lengths(f"short{next(numbers)}", 4))
        drive.step()

    for _ in range(30):
        step_among_shorter()
    drive.add(with_lengths("long", 6, priority=-1))
    for _ in range(30):
        step_among_shorter()
    assert ("long", 0) in drive.finished
    drive.expect_all_answered()


@given(
    films=st.lists(
        st.tuples(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(-1, 1), *[st.booleans()] * 2),
        min_size=1,
        max_size=8,
    ),
    num_pictures=st.integers(0, 3),
    shares_embeddings=st.booleans(),
    takes_turns=st.booleans(),
    most_encoded=st.integers(1, 4),
    max_num_seqs=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
@thorough(100)
def test_however_little_room_there_is_every_request_ends(
    films: list[tuple[list[int], int, bool, bool]],
    num_pictures: int,
    shares_embeddings: bool,
    takes_turns: bool,
    most_encoded: int,
    max_num_seqs: int,
    seed: int,
) -> None:
    chance = Random(seed)
    config = make_config(
        num_pictures=num_pictures,
        shares_embeddings=shares_embeddings,
        takes_turns=takes_turns,
        max_num_encoder_input_tokens=most_encoded * TOKENS_PER_PICTURE,
        max_num_batched_tokens=12 + max_num_seqs,
        max_num_seqs=max_num_seqs,
    )
    drive = Drive(config, is_done=lambda: chance.random() < 0.3)
    for number, (lengths, priority, shares, leaves_out) in enumerate(films):
        request = with_lengths(f"{number}", *lengths, priority=priority, shares=shares, leaves_out=leaves_out)
        drive.kept_pixels.update(item.media_hash for item in request.media)
        drive.add(request)
        for _ in range(chance.randrange(4)):
            drive.step()
    drive.run(max_steps=5000)
    drive.expect_right_answers()
    drive.expect_nothing_left()
    assert drive.finished.keys() == {(f"{number}", 0) for number in range(len(films))}


# Media that were left out -------------------------------------------------------------------------------------


def drive_with_an_answer_about(*pictures: str, **config: Any) -> Drive:
    """Another request sent the pictures before; the one that answers left them out, and nobody can make them again."""
    drive = Drive(make_config(**{"num_blocks": 12, "num_pictures": 2, **config}))
    drive.run(make_request("sent", 3, *pictures, max_tokens=1))
    drive.kept_pixels.clear()
    drive.add(make_request("left out", 3, *pictures, unsent_media=pictures, max_tokens=20, ignore_eos=True, priority=1))
    drive.step()
    assert drive.tokens["left out", 0]
    return drive


def preempt_it(drive: Drive, *pictures: str) -> None:
    """Let more urgent answers about other pictures take all of its pages."""
    pages_before = drive.scheduler.pages.num_preemptions
    for number, picture in enumerate(pictures):
        drive.add(make_request(f"urgent {number}", number + 1, picture, max_tokens=25, ignore_eos=True))
    drive.run()
    assert drive.scheduler.pages.num_preemptions > pages_before


def expect_it_went_on(drive: Drive) -> None:
    assert drive.finished["left out", 0] == "length"
    drive.expect_right_answers()
    drive.expect_nothing_left()


@pytest.mark.parametrize("caches_prefixes", [True, False], ids=["found as a prefix", "computed"])
def test_a_preempted_answer_about_a_picture_that_was_left_out_goes_on(caches_prefixes: bool) -> None:
    drive = drive_with_an_answer_about("cat", caches_prefixes=caches_prefixes)
    preempt_it(drive, "dog", "owl", "elk")
    expect_it_went_on(drive)
    assert drive.runner.encoded.count("cat") == 1


def test_after_resets_it_goes_on_and_new_requests_find_nothing_of_its_picture() -> None:
    drive = drive_with_an_answer_about("cat")
    drive.scheduler.reset(prefix=True, encoder=True)
    drive.add(make_request("too late", 3, "cat", unsent_media=("cat",)))
    drive.step()
    assert ("too late", 0) in drive.aborted
    preempt_it(drive, "dog", "owl", "elk")
    expect_it_went_on(drive)


def test_after_a_reset_a_request_that_sends_its_picture_does_not_wait_for_its_end() -> None:
    drive = drive_with_an_answer_about("cat", num_blocks=20)
    drive.scheduler.reset(prefix=True, encoder=True)
    drive.add(make_request("sent again", 5, "cat", max_tokens=2))
    for _ in range(4):
        drive.step()
    assert ("sent again", 0) in drive.finished
    assert drive.runner.encoded.count("cat") == 2
    preempt_it(drive, "dog", "owl", "elk")
    expect_it_went_on(drive)
    assert drive.runner.encoded.count("cat") == 2


def test_the_pictures_are_not_kept_once_it_has_ended() -> None:
    drive = drive_with_an_answer_about("cat")
    assert drive.scheduler.media.encoder_cache.num_free_embeddings == TOKENS_PER_PICTURE
    drive.run()
    assert drive.scheduler.media.encoder_cache.num_free_embeddings == 2 * TOKENS_PER_PICTURE


def test_others_get_room_even_if_it_then_cannot_go_on() -> None:
    drive = drive_with_an_answer_about("cat", "dog", num_blocks=13, caches_prefixes=False)
    preempt_it(drive, "owl", "elk")
    assert drive.finished.keys() == {("sent", 0), ("urgent 0", 0), ("urgent 1", 0)}
    assert ("left out", 0) in drive.aborted
    drive.expect_right_answers()
    drive.expect_nothing_left()


def test_one_whose_pictures_do_not_fit_together_is_computed_all_the_same() -> None:
    drive = Drive(make_config(num_pictures=2))
    pictures = ("cat", "dog", "owl", "elk")
    drive.kept_pixels.update(pictures)
    drive.run(make_request("left out", 3, *pictures, unsent_media=pictures), max_steps=20)
    drive.expect_right_answers()
    drive.expect_nothing_left()


# Reports and counters -----------------------------------------------------------------------------------------


def test_an_item_found_then_evicted_is_reported_as_made_if_it_is_made() -> None:
    drive = Drive(make_config(num_pictures=1))
    drive.runner.set_pace(lambda: False)
    step_with(drive, make_request("first", "cat", 3))
    drive.step()
    step_with(drive, make_request("late", 5, "cat", 2))
    drive.scheduler.abort("first")
    step_with(drive, make_request("early", 7, "x", "y", 2, priority=-1))
    drive.step()
    drive.runner.set_pace(lambda: True)
    drive.run()
    assert drive.runner.encoded == ["cat", "x", "y", "cat"]
    origins = {begun.request.request_id: begun.origins for begun in drive.scheduler.take_begun()}
    assert origins == {"early": {0: "made", 1: "made"}, "late": {0: "made"}}


def test_an_item_made_for_a_request_stays_made_though_the_request_finds_it_later() -> None:
    drive = quiet_drive()
    drive.add(promising("a", 3, "cat", 2))
    drive.add(make_request("b", 5, "cat", 2))
    drive.deliver("cat")
    media, (first, second) = drive.scheduler.media, drive.scheduler.lineup.waiting
    media.claim(first, 0)
    for encoding in media.encodings.take():
        media.finish(encoding.encoder_key)
    media.drop(first)
    for state in (first, second):
        assert media.claim(state, 0) is None
    assert (first.origins, second.origins) == ({0: "made"}, {0: "device"})


@pytest.mark.parametrize(("claimed_from", "found"), [(0, 1), (1, 0)], ids=["a longer prefix", "a shorter prefix"])
def test_room_returned_when_another_prefix_is_found_is_reported_at_once(claimed_from: int, found: int) -> None:
    drive = quiet_drive()
    drive.add(promising("a", 3, "cat", "dog", 2))
    drive.deliver("cat")
    drive.deliver("dog")
    media, (state,) = drive.scheduler.media, drive.scheduler.lineup.waiting
    assert media.claim(state, claimed_from) is None
    media.take_awaited_change()
    media.claim(state, found)
    assert media.take_awaited_change()


# The limit of pixels -------------------------------------------------------------------------------------------


def asked_since(drive: Drive, num_before: int) -> list[str]:
    return [media_hash for _, media_hash in drive.needed[num_before:]]


def test_a_burst_of_new_pictures_is_asked_for_only_as_fast_as_they_are_encoded() -> None:
    """At most what the encoder takes four times, and one; the config's encoder takes four pictures."""
    drive = Drive(make_config(num_pictures=100, num_blocks=400), is_done=lambda: False)
    for index in range(50):
        drive.add(make_request(f"r{index:02}", f"picture {index:02}", 2, max_tokens=1))
    for _ in range(5):
        drive.step()
    assert [media_hash for _, media_hash in drive.needed] == [f"picture {index:02}" for index in range(17)]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
    assert len(drive.needed) == 50, "asked for once"


def test_a_picture_is_asked_for_before_the_rest_of_an_earlier_book() -> None:
    drive = Drive(make_config(num_pictures=100, num_blocks=400), is_done=lambda: False)
    drive.add(make_request("book", *frames("page", 40), 2, max_tokens=1))
    drive.step()
    drive.add(make_request("question", "picture", 2, max_tokens=1))
    drive.step()
    assert asked_since(drive, 0) == [*frames("page", 16), "picture"]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_the_parts_of_a_picture_are_asked_for_together_although_they_exceed_the_limit() -> None:
    drive = quiet_drive(num_pictures=100, num_blocks=400)
    step_with(drive, make_request("a", *frames("other", 15), "whole", *(f"+part {n}" for n in range(9)), 2))
    assert len(drive.needed) == 25
    step_with(drive, make_request("b", "more", 2), make_request("c", "yet more", 2))
    assert asked_since(drive, 25) == ["more"], "one is asked for beyond the limit"


def test_the_first_sequence_gets_its_pixels_though_others_that_need_its_pages_fill_the_limit() -> None:
    """Those behind it hold all room of pixels and wait for the end of the sequence that is first."""
    drive = quiet_drive(num_blocks=20, num_pictures=100, max_num_seqs=1)
    for index in range(16):
        drive.add(promising(f"r{index:02}", f"picture {index:02}", 2, max_tokens=1))
    step_with(drive, make_request("first", *frames("page", 2), 2, max_tokens=1, priority=-1))
    assert drive.needed == [("first", "page 0")]
    drive.deliver("page 0")
    for _ in range(4):
        drive.step()
    assert drive.needed == [("first", "page 0"), ("first", "page 1")]
    drive.deliver("page 1")
    for index in range(16):
        drive.deliver(f"picture {index:02}")
    drive.expect_all_answered()


def test_pictures_are_asked_for_though_pixels_that_cannot_be_encoded_yet_fill_the_limit() -> None:
    """Of requests behind a stream that lack an earlier picture; the stream itself waits for nothing."""
    drive = Drive(make_config(num_pictures=100, num_blocks=400, max_num_seqs=40), delivers=True)
    drive.run(make_request("before", "old", 2, max_tokens=1))
    drive.scheduler.reset(prefix=False, encoder=True)
    drive.add(make_request("stream", 2, max_tokens=1000, ignore_eos=True))
    drive.step()
    for index in range(16):
        picture = f"new {index:02}"
        drive.add(make_request(f"r{index:02}", index + 1, "old", 9, picture, 2, coming_media=(picture,), max_tokens=1))
    drive.add(make_request("photo", "photo", 2, max_tokens=1))
    for _ in range(60):
        drive.step()
    assert len(drive.scheduler.lineup) == 1, "all but the stream are answered"


def test_no_picture_waits_for_films_that_are_being_made() -> None:
    drive = quiet_drive(num_pictures=100, num_blocks=400)
    film = make_request("film", *frames("film", 20), 2)
    moments = tuple(replace(item, modality="video") for item in film.media)
    step_with(drive, replace(film, media=moments), make_request("photo", "photo", 2))
    assert ("photo", "photo") in drive.needed


def test_what_a_request_that_left_was_to_make_is_asked_of_others_within_the_limit() -> None:
    drive = quiet_drive(num_pictures=200, num_blocks=800)
    step_with(drive, promising("promising", *frames("page", 40), 2), make_request("other", *frames("page", 40), 3))
    assert drive.needed == []
    drive.scheduler.abort("promising")
    drive.step()
    assert drive.needed == [("other", each) for each in frames("page", 16)]


def test_the_queue_does_not_grow_by_requests_that_left() -> None:
    drive = quiet_drive(num_pictures=100, num_blocks=400)
    step_with(drive, make_request("first", *frames("page", 17), 2))
    for index in range(20):
        # Its turn comes after that of the first one's last page, which waits.
        step_with(drive, make_request(f"r{index}", *frames(f"r{index}", 18), 2))
        drive.abort(f"r{index}")
    assert len(drive.scheduler.media.pixels._queues[False]) < 100


@pytest.mark.parametrize("modality", ["image", "video"])
def test_pictures_are_asked_for_beyond_the_limit_though_the_first_waits_for_one_that_takes_long(modality: Any) -> None:
    drive = quiet_drive(num_pictures=200, num_blocks=800, max_num_seqs=40)
    slow = make_request("slow", *(frames("slow", 3) if modality == "video" else ["slow 0"]), 2, max_tokens=1)
    step_with(drive, replace(slow, media=tuple(replace(item, modality=modality) for item in slow.media)))
    for index in range(16):
        drive.add(
            make_request(f"r{index:02}", "old", 9, f"new {index:02}", index + 1, coming_media=(f"new {index:02}",))
        )
    drive.add(make_request("photo", "photo", 2, max_tokens=1))
    drive.step()
    for index in range(16):
        drive.deliver(f"new {index:02}")
    for _ in range(60):
        for request_id, media_hash in drive.needed:
            if not media_hash.startswith("slow") and drive.is_live(request_id):
                drive.deliver(media_hash)
        drive.step()
    assert {state.request.request_id for state in drive.scheduler.lineup.parked} == {"slow"}
    assert len(drive.scheduler.lineup) == 1


def test_many_that_wait_for_one_picture_are_queued_without_looking_through_the_queue_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    monkeypatch.setattr("keepsight.scheduling.pixel_requests.heapify", lambda queue: looked.append(len(queue)))
    drive = quiet_drive(num_pictures=100, num_blocks=4000, max_num_seqs=400, max_num_batched_tokens=600)
    step_with(drive, make_request("book", *frames("page", 17), 2))
    for index in range(300):
        drive.add(make_request(f"r{index}", index % 9 + 1, "cat", 2))
    drive.step()
    assert sum(looked) < 1000
