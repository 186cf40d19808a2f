"""Which sequence gets pages when there are too few, and which one loses them."""

import itertools
from typing import Any

import pytest

from keepsight.scheduling import page_grants
from tests.scheduling.drive import Drive, make_config, make_request, with_text


def drive_short_of_pages(**config: Any) -> Drive:
    """A prompt holds most pages with the text before its picture; work beside the steps never ends."""
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


def test_a_request_waiting_for_pixels_keeps_no_pages_that_a_running_answer_needs() -> None:
    drive = drive_short_of_pages()
    expect_a_stream_to_end(drive)
    drive.runner.set_pace(lambda: True)
    drive.deliver("cat")
    drive.expect_all_answered()


def test_a_request_waiting_for_the_encoder_keeps_no_pages_that_a_running_answer_needs() -> None:
    drive = drive_short_of_pages()
    drive.deliver("cat")
    drive.step()
    expect_a_stream_to_end(drive)
    drive.runner.set_pace(lambda: True)
    drive.run()
    assert drive.runner.encoded == ["cat"], "the embeddings were on their way"
    drive.expect_right_answers()


def test_a_request_waiting_for_pixels_keeps_no_pages_that_a_new_prompt_needs() -> None:
    drive = drive_short_of_pages()
    drive.add(with_text(make_request("text", 30), [9] * 30))
    for _ in range(6):
        drive.step()
    assert drive.finished.keys() == {("text", 0)}
    assert drive.scheduler.pages.num_preemptions == 1


def test_a_request_that_gave_pages_away_takes_none_until_it_can_progress() -> None:
    drive = drive_short_of_pages(caches_prefixes=False)
    drive.add(with_text(make_request("text", 30), [9] * 30))
    drive.step()
    drive.deliver("cat")
    for _ in range(8):
        drive.step()
    assert drive.scheduler.kv_cache.usage == 0
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def test_a_request_waiting_for_media_is_not_starved_by_others_taking_its_pages() -> None:
    drive = Drive(make_config(num_blocks=20, num_pictures=1, shares_embeddings=False, caches_prefixes=False))
    drive.runner.set_pace(lambda: len(drive.runner.plans) % 8 == 0)
    drive.add(make_request("pictures", 3, "cat", 2, "dog", 33, "owl", 3))
    for number in range(400):
        if len(drive.scheduler.lineup) < 4:
            drive.add(make_request(f"text{number}", 20, cache_salt=f"{number}", max_tokens=20, ignore_eos=True))
        drive.step()
    assert ("pictures", 0) in drive.finished
    drive.expect_all_answered()


@pytest.mark.parametrize(("max_tokens", "num_pages"), [(1, 1), (2, 2), (5, 2), (6, 3)])
def test_no_page_is_taken_ahead_for_the_answer_s_last_token(max_tokens: int, num_pages: int) -> None:
    drive = Drive(make_config(max_prompt_tokens_beside_streams=0), is_done=lambda: False)
    drive.add(make_request("a", 4, max_tokens=max_tokens, ignore_eos=True))
    drive.scheduler.schedule()
    assert drive.scheduler.kv_cache.num_blocks_of(("a", 0)) == num_pages


def test_pages_are_taken_from_the_last_request_and_all_answers_stay_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_grants, "TOKENS_AHEAD", 0)
    drive = Drive(make_config(num_blocks=9, caches_prefixes=False))
    for name in ("first", "second", "last"):
        drive.add(make_request(name, 9, max_tokens=8, ignore_eos=True))
    states = tuple(drive.scheduler.lineup.waiting)
    drive.expect_all_answered()
    assert [state.num_preemptions for state in states] == [0, 0, 1]
    assert drive.scheduler.pages.num_preemptions == 1


def test_a_prompt_that_waits_for_pages_is_not_overtaken_by_a_shorter_one() -> None:
    """Otherwise it would starve: each page that is given back would go to yet another short one."""
    drive = Drive(make_config(num_blocks=20))
    drive.add(make_request("before", 30, max_tokens=6, ignore_eos=True))
    drive.step()
    drive.add(make_request("long", 60, cache_salt="its own", max_tokens=1))
    drive.add(make_request("short", 5, cache_salt="another", max_tokens=1))
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["before"]
    drive.expect_all_answered()


def test_a_request_without_pages_waits_instead_of_preempting_one_computed_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_grants, "TOKENS_AHEAD", 0)
    drive = Drive(make_config(num_blocks=10, max_prompt_tokens_beside_streams=0), is_done=lambda: False)
    drive.add(make_request("stream", 3, max_tokens=30, ignore_eos=True))
    drive.step()
    drive.add(make_request("long", 32, cache_salt="its own"))
    for _ in range(9):
        drive.step()
    # Two of the ten pages are its own, and they are full.
    assert len(drive.tokens["stream", 0]) == 6
    assert drive.scheduler.pages.num_preemptions == 0
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


@pytest.mark.parametrize("num_pictures", [1, 2])
def test_pages_of_a_request_back_in_line_are_taken_in_the_same_step(num_pictures: int) -> None:
    """Otherwise nothing would be retried before an encoding ends."""
    drive = Drive(make_config(num_blocks=16, num_pictures=num_pictures, max_num_seqs=1), is_done=lambda: False)
    drive.add(make_request("last", 32, "dog", 3, cache_salt="its own", priority=2))
    for _ in range(4):
        drive.step()
    drive.add(make_request("first", 32, "cat", 1, "owl", 1, priority=0))
    for _ in range(3):
        drive.step()
    drive.add(make_request("between", 40, cache_salt="another", priority=1, max_tokens=1))
    # The other two hold all pages and wait for embeddings; the pages the last gives back let the first go on.
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["between"]
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()


def drive_until_an_answer_lacks_pages(max_num_batched_tokens: int, **config: Any) -> Drive:
    """The first request keeps the pages of a picture and waits for the only seat, until the answer finds no page."""
    tight: dict[str, Any] = {"num_blocks": 8, "block_size": 2, "max_num_seqs": 1, "cuts_items": True}
    drive = Drive(make_config(**tight, max_num_batched_tokens=max_num_batched_tokens, **config), delivers=False)
    drive.run(make_request("known", 1, cache_salt="its own", max_tokens=1))
    drive.add(make_request("pictures", "cat", "dog", 1, max_tokens=1))
    drive.step()
    drive.deliver("cat")
    for _ in range(8):
        drive.step()
    drive.runner.set_pace(lambda: False)
    drive.deliver("dog")
    drive.step()
    drive.add(make_request("answer", 3, max_tokens=9, ignore_eos=True))
    drive.step()
    drive.runner.set_pace(lambda: True)
    return drive


@pytest.mark.parametrize("most_joining", [None, 0])
def test_a_preempted_answer_leaves_its_token_of_the_step_to_an_earlier_request(most_joining: int | None) -> None:
    """Otherwise nothing would be computed before the next message: an empty plan lets the engine's loop sleep."""
    drive = drive_until_an_answer_lacks_pages(1, max_prompt_tokens_beside_streams=most_joining)
    plans = drive.run()
    computed = [piece.sequence_id[0] for plan in plans for piece in (*plan.now, *plan.beside)]
    assert [name for name, _ in itertools.groupby(computed)] == ["answer", "pictures", "answer"]
    assert any(plan.beside for plan in plans) == (most_joining == 0)
    assert drive.scheduler.pages.num_preemptions == 1
    drive.expect_right_answers()


def test_a_first_token_recalled_in_the_step_in_which_an_answer_is_preempted_is_given_out() -> None:
    drive = drive_until_an_answer_lacks_pages(2)
    drive.add(make_request("again", 1, cache_salt="its own", max_tokens=1, priority=-1))
    while not (plan := drive.step()).recall:
        assert drive.scheduler.pages.num_preemptions == 0
    assert (plan.now, drive.scheduler.pages.num_preemptions) == ([], 1)
    drive.expect_all_answered()


def test_a_preempted_answer_whose_pages_remain_continues_at_its_last_token() -> None:
    drive = Drive(make_config())
    drive.add(make_request("a", 9, max_tokens=12, ignore_eos=True))
    for _ in range(6):
        drive.step()
    [state] = drive.scheduler.lineup.running
    num_computed = state.num_computed
    assert num_computed % 4, "its last page is not full"
    drive.scheduler.pages.preempt(state)
    [piece] = drive.step().now
    assert (piece.start, piece.length) == (num_computed, 1)
    drive.run()
    drive.expect_right_answers()


def test_pages_of_a_request_that_must_wait_again_go_to_a_running_answer_in_the_same_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise nothing would be retried before the work beside ends."""
    monkeypatch.setattr(page_grants, "TOKENS_AHEAD", 0)
    config = make_config(num_blocks=20, max_prompt_tokens_beside_streams=0)
    drive = Drive(config, delivers=False, is_done=lambda: False)
    drive.add(make_request("pictures", 40, "cat", 1, "dog", 1))
    drive.step()
    drive.add(make_request("stream", 3, cache_salt="its own", max_tokens=30, ignore_eos=True))
    drive.step()
    drive.add(make_request("long", 32, cache_salt="another"))
    while drive.scheduler.kv_cache.usage < 1 or len(drive.tokens["stream", 0]) % 4 != 2:
        drive.step()
    drive.deliver("dog")
    assert [piece.sequence_id[0] for piece in drive.step().now] == ["stream"]
    assert drive.scheduler.pages.num_preemptions == 1
    drive.deliver("cat")
    drive.runner.set_pace(lambda: True)
    drive.expect_all_answered()
