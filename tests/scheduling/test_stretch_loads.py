"""Stored keys and values are found again as they were computed, and no other request waits for the loads."""

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from keepsight.scheduling.stretch_loads import StretchLoad
from tests.scheduling.drive import Drive, make_config, make_request

# Two blocks of four.
TOKENS = 8


def drive_over(before: Drive | None = None, **config: Any) -> Drive:
    """Return another engine that finds what `before` kept."""
    drive = Drive(make_config(blocks_per_stretch=2, **config))
    drive.stretches = {} if before is None else before.stretches
    return drive


def after_asking(*parts: int | str, **options: Any) -> Drive:
    drive = drive_over()
    drive.run(make_request("before", *parts, **options))
    drive.step()
    return drive


def test_another_engine_finds_the_whole_stretches_that_one_computed() -> None:
    drive = drive_over(after_asking(3 * TOKENS + 5))
    drive.run(make_request("a", 3 * TOKENS + 5))
    drive.expect_right_answers()
    assert drive.cached == {("a", 0): 3 * TOKENS}
    assert drive.runner.num_computed_tokens == 5 + 4
    drive.expect_nothing_left()


def test_a_request_that_waits_for_its_grammar_finds_them_too() -> None:
    drive, grammar = drive_over(after_asking(3 * TOKENS + 5)), Future[None]()
    drive.add(make_request("a", 3 * TOKENS + 5), grammar)
    assert not drive.step().now
    grammar.set_result(None)
    drive.scheduler.grammar_compiled("a")
    drive.expect_all_answered()
    assert drive.cached == {("a", 0): 3 * TOKENS}


def test_one_token_is_always_computed() -> None:
    drive = drive_over(after_asking(3 * TOKENS, max_tokens=30, ignore_eos=True))
    drive.run(make_request("a", 2 * TOKENS))
    assert drive.cached == {("a", 0): TOKENS}


def test_an_answer_is_found_as_the_beginning_of_the_next_prompt() -> None:
    before = after_asking(TOKENS, max_tokens=2 * TOKENS + 1, ignore_eos=True)
    drive, answer = drive_over(before), before.tokens["before", 0]
    request = make_request("a", TOKENS)
    drive.run(replace(request, token_ids=(*request.token_ids, *answer)))
    drive.expect_right_answers()
    assert drive.cached == {("a", 0): 3 * TOKENS}


def test_a_picture_covered_by_a_load_is_neither_asked_for_nor_encoded() -> None:
    drive = drive_over(after_asking(2, "cat", TOKENS))
    drive.run(make_request("a", 2, "cat", TOKENS))
    drive.expect_right_answers()
    assert (drive.needed, drive.runner.encoded) == ([], [])


def test_a_partly_covered_picture_is_encoded_and_another_in_its_place_finds_nothing() -> None:
    before = after_asking(4, "cat", 3)
    for name in ("cat", "dog"):
        drive = drive_over(before)
        drive.run(make_request("a", 4, name, 3))
        drive.expect_right_answers()
        assert drive.runner.encoded == [name]
        assert drive.cached == {("a", 0): TOKENS if name == "cat" else 0}


def test_tenants_and_adapters_find_nothing_of_each_other_s() -> None:
    drive = drive_over(after_asking(2 * TOKENS + 1, cache_salt="x"))
    drive.run(make_request("a", 2 * TOKENS + 1), make_request("b", 2 * TOKENS + 1, cache_salt="x"))
    assert drive.cached == {("a", 0): 0, ("b", 0): 2 * TOKENS}


def test_nothing_is_loaded_that_is_on_the_device() -> None:
    drive = after_asking(2 * TOKENS + 1)
    drive.loads = False
    drive.run(make_request("a", 2 * TOKENS + 1))
    assert drive.stretch_loads == {}


def test_only_the_part_that_is_not_on_the_device_is_loaded() -> None:
    before = after_asking(4 * TOKENS + 1)
    drive = drive_over(before)
    drive.run(make_request("short", 2 * TOKENS + 1))
    drive.loads = False
    drive.add(make_request("long", 4 * TOKENS + 1))
    drive.step()
    assert drive.stretch_loads == {StretchLoad(2, tuple(before.stretches)[2:4]): 0}
    drive.loads = True
    drive.run()
    assert drive.cached["long", 0] == 4 * TOKENS


def test_a_load_delays_no_other_request_and_a_waiting_one_may_leave() -> None:
    drive = drive_over(after_asking(2 * TOKENS + 1), max_num_seqs=1)
    drive.loads = False
    for name in ("slow", "left"):
        drive.add(make_request(name, 2 * TOKENS + 1))
    drive.add(make_request("text", 5))
    for _ in range(9):
        drive.step()
    assert drive.finished == {("text", 0): drive.finished["text", 0]}
    # Both wait for the same load.
    assert len(drive.stretch_loads) == 1
    drive.abort("left")
    drive.loads = True
    drive.run()
    drive.expect_right_answers()
    assert drive.cached["slow", 0] == 2 * TOKENS


def test_a_load_may_end_after_all_its_requests_left() -> None:
    drive = drive_over(after_asking(2 * TOKENS + 1))
    drive.loads = False
    drive.add(make_request("a", 2 * TOKENS + 1))
    drive.step()
    drive.abort("a")
    drive.loads = True
    drive.expect_nothing_left()


def test_all_choices_of_a_request_wait_for_one_load() -> None:
    drive = drive_over(after_asking(2 * TOKENS + 1))
    drive.run(make_request("a", 2 * TOKENS + 1, n=3))
    drive.expect_right_answers()
    assert drive.cached == {("a", choice): 2 * TOKENS for choice in range(3)}


def test_a_request_for_prompt_logprobs_waits_for_no_load() -> None:
    drive = drive_over(after_asking(2 * TOKENS + 1))
    drive.run(make_request("a", 2 * TOKENS + 1, prompt_logprobs=0))
    drive.expect_right_answers()
    assert drive.cached == {("a", 0): 0}


@pytest.mark.parametrize("is_late", [False, True])
def test_the_part_that_is_lost_or_late_is_computed(is_late: bool) -> None:
    before = after_asking(3 * TOKENS + 1)
    if not is_late:
        del before.stretches[tuple(before.stretches)[1]]
    drive = drive_over(before)
    drive.loads = False
    drive.add(make_request("a", 3 * TOKENS + 1))
    drive.step()
    drive.load_stretches(next(iter(drive.stretch_loads)), 3, is_late=is_late)
    drive.run()
    drive.expect_right_answers()
    assert drive.cached == {("a", 0): 0 if is_late else TOKENS}


def test_if_all_blocks_are_in_use_loaded_stretches_are_computed_instead() -> None:
    before = after_asking(6 * TOKENS)
    drive = drive_over(before, num_blocks=14)
    drive.add(make_request("long", 20, max_tokens=30, ignore_eos=True))
    drive.step()
    drive.run(make_request("a", 6 * TOKENS))
    drive.expect_right_answers()
    assert drive.finished.keys() == {("long", 0), ("a", 0)}


def test_after_a_reset_nothing_that_was_computed_before_is_kept() -> None:
    drive = drive_over()
    drive.add(make_request("a", 2 * TOKENS + 1, max_tokens=40, ignore_eos=True))
    drive.step()
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.run()
    assert drive.stretches == {}


def test_blocks_loaded_for_a_request_waiting_for_a_seat_are_not_evicted_for_others() -> None:
    before = drive_over(max_num_seqs=8, num_blocks=200)
    for number in range(6):
        before.run(make_request(f"{number}", 4 * TOKENS + 1, cache_salt=f"{number}"))
    before.step()
    drive = drive_over(before, num_blocks=30, max_num_seqs=1)
    drive.run(*(make_request(f"{number}", 4 * TOKENS + 1, cache_salt=f"{number}") for number in range(6)))
    drive.expect_right_answers()
    assert set(drive.cached.values()) == {4 * TOKENS}
    kv_cache = drive.scheduler.kv_cache
    assert kv_cache.num_loaded_hit_tokens == kv_cache.num_hit_tokens == 6 * 4 * TOKENS


def test_a_load_that_several_wait_for_counts_as_loaded_once() -> None:
    drive = drive_over(after_asking(2 * TOKENS + 1))
    drive.run(*(make_request(f"{number}", 2 * TOKENS + 1) for number in range(3)))
    drive.expect_right_answers()
    assert set(drive.cached.values()) == {2 * TOKENS}
    kv_cache = drive.scheduler.kv_cache
    assert kv_cache.num_loaded_hit_tokens == 2 * TOKENS
    assert kv_cache.num_hit_tokens == 3 * 2 * TOKENS


def test_a_load_counts_even_if_the_first_that_waited_for_it_leaves() -> None:
    drive = drive_over(after_asking(2 * TOKENS + 1))
    drive.loads = False
    for number in range(3):
        drive.add(make_request(f"{number}", 2 * TOKENS + 1))
    drive.step()
    drive.load_stretches(next(iter(drive.stretch_loads)), 2)
    drive.scheduler.abort("0")
    drive.run()
    assert drive.scheduler.kv_cache.num_loaded_hit_tokens == 2 * TOKENS


def test_an_unused_load_counts_no_hit() -> None:
    before = after_asking(6 * TOKENS)
    drive = drive_over(before)
    drive.loads = False
    drive.add(make_request("a", 6 * TOKENS))
    drive.step()
    drive.load_stretches(next(iter(drive.stretch_loads)), 6)
    drive.scheduler.reset(prefix=True, encoder=False)
    drive.run()
    drive.expect_right_answers()
    assert drive.scheduler.kv_cache.num_loaded_hit_tokens == 0
