"""Embeddings in a tier are loading, ready or absent: other requests do not wait for them; nothing is encoded twice."""

from typing import Any

import pytest

from keepsight.scheduling.embedding_loads import MAX_AT_ONCE
from keepsight.testing import array_like, pixels_like
from tests.scheduling.drive import Drive, make_config, make_request


def tiered_drive(*held: str, loads: bool = True, **config: Any) -> Drive:
    """The tier holds these embeddings; tests deliver pixels and, unless the drive `loads`, embeddings."""
    drive = Drive(make_config(has_tiers=True, **config), delivers=False, loads=loads)
    drive.tier = {name: array_like(pixels_like(name)) for name in held}
    return drive


def test_embeddings_in_a_tier_need_no_pixels_and_no_encoding() -> None:
    drive = tiered_drive("cat", "dog")
    drive.add(make_request("a", 3, "cat", 2, "dog", "cat"))
    drive.expect_all_answered()
    assert drive.needed == []
    assert drive.runner.encoded == []
    assert [key for plan in drive.runner.plans for key in plan.place] == ["cat", "dog"]


def test_embeddings_in_no_tier_are_encoded_as_usual_and_stored() -> None:
    drive = tiered_drive("cat")
    drive.add(make_request("a", 3, "cat", "dog"))
    drive.step()
    assert drive.needed == [("a", "dog")]
    drive.deliver("dog")
    drive.expect_all_answered()
    assert drive.runner.encoded == ["dog"]
    assert drive.tier.keys() == {"cat", "dog"}


def test_a_load_is_asked_for_once_and_before_the_request_has_its_turn() -> None:
    drive = tiered_drive("cat", loads=False, max_num_seqs=1)
    drive.add(make_request("first", 3, max_tokens=9))
    drive.step()
    for name in "ab":
        drive.add(make_request(name, 3, "cat"))
    assert [load.encoder_key for load in drive.scheduler.media.loads.take_wanted()] == ["cat"]
    drive.end_load("cat")
    drive.expect_all_answered()
    assert drive.runner.encoded == []


def test_many_wanted_loads_are_asked_for_a_few_at_a_time_and_each_once() -> None:
    drive = tiered_drive(loads=False)
    names = [f"p{number}" for number in range(2 * MAX_AT_ONCE + 6)]
    for name in names:
        drive.add(make_request(name, 3, name))
    taken = [load.encoder_key for load in drive.scheduler.media.loads.take_wanted()]
    # Not yet asked for, then aborted, then wanted again.
    drive.scheduler.abort(names[-1], 0)
    drive.add(make_request("again", 3, names[-1]))
    assert len(taken) == MAX_AT_ONCE
    while loads := drive.scheduler.media.loads.take_wanted():
        assert len(loads) <= MAX_AT_ONCE
        taken += [load.encoder_key for load in loads]
    assert sorted(taken) == sorted(names)


@pytest.mark.parametrize("others_send", [None, False, True])
def test_a_load_tells_whether_any_request_that_waits_for_it_has_the_picture(others_send: bool | None) -> None:
    drive = tiered_drive("cat", loads=False)
    drive.add(make_request("a", 3, "cat", 2, "dog", unsent_media=("cat",)))
    if others_send is not None:
        drive.add(make_request("b", 3, "cat", unsent_media=() if others_send else ("cat",)))
    loads = drive.scheduler.media.loads.take_wanted()
    assert {load.media_hash: load.can_be_made for load in loads} == {"cat": bool(others_send), "dog": True}


def test_a_load_that_is_not_wanted_any_more_is_not_asked_for() -> None:
    drive = tiered_drive("cat", loads=False)
    drive.add(make_request("a", 3, "cat"))
    drive.scheduler.abort("a")
    assert drive.scheduler.media.loads.take_wanted() == []


def test_a_request_waiting_for_a_load_does_not_delay_others() -> None:
    drive = tiered_drive("cat", loads=False, max_num_seqs=1)
    drive.add(make_request("a", 3, "cat"))
    drive.add(make_request("b", 4, max_tokens=2))
    for _ in range(3):
        drive.step()
    assert drive.finished.keys() == {("b", 0)}
    drive.end_load(drive.loading.pop())
    drive.expect_all_answered()


def test_an_item_whose_load_is_late_is_encoded_and_the_load_is_ignored() -> None:
    drive = tiered_drive("cat", loads=False)
    drive.add(make_request("a", 3, "cat"))
    drive.step()
    drive.end_load("cat", is_late=True)
    drive.step()
    assert drive.needed == [("a", "cat")]
    assert not drive.end_load("cat")
    drive.deliver("cat")
    drive.expect_all_answered()
    assert drive.runner.encoded == ["cat"]


def test_pixels_of_an_item_are_asked_for_while_another_is_being_encoded() -> None:
    drive = tiered_drive(loads=False)
    drive.runner.set_pace(lambda: False)
    drive.add(make_request("a", 3, "cat", "dog"))
    drive.step()
    drive.end_load("cat")
    drive.deliver("cat")
    drive.step()
    assert drive.runner.is_busy
    drive.end_load("dog")
    drive.step()
    assert drive.needed == [("a", "dog")]
    drive.runner.set_pace(lambda: True)
    drive.deliver("dog")
    drive.expect_all_answered()


def test_pixels_are_asked_for_once_it_is_known_which_parts_need_them() -> None:
    """If its parts were asked for one by one, the picture would be decoded once for each."""
    drive = tiered_drive("+right", loads=False)
    drive.add(make_request("a", 3, "cat", "dog", "+left", "+right", "+top"))
    drive.step()
    drive.end_load("dog")
    drive.step()
    drive.end_load("cat")
    drive.step()
    assert drive.needed == [("a", "cat")]
    # While it waits for the pixels of another picture.
    for part in ("+top", "+right", "+left"):
        assert drive.scheduler.media.take_needed() == []
        drive.end_load(part)
        drive.step()
    assert drive.needed == [("a", each) for each in ("cat", "dog", "+left", "+top")]
    for _, media_hash in drive.needed:
        drive.deliver(media_hash)
    drive.expect_all_answered()
    assert drive.runner.encoded == ["cat", "dog", "+left", "+top"]


def test_the_parts_of_a_picture_are_asked_for_together_however_few_loads_there_are_at_once() -> None:
    drive = tiered_drive(loads=False, num_blocks=64, max_model_len=256)
    parts = [f"{kind}{number}" for number in range(MAX_AT_ONCE // 5 + 1) for kind in ("whole", "+a", "+b", "+c", "+d")]
    drive.add(make_request("a", 3, *parts))
    asked: list[list[str]] = []
    while loads := drive.scheduler.media.loads.take_wanted():
        for load in loads:
            drive.end_load(load.encoder_key)
        drive.scheduler.schedule()
        asked += [list(needed.media_hashes) for needed in drive.scheduler.media.take_needed()]
    assert asked == [parts[:15], parts[15:]]


def test_embeddings_loaded_for_an_aborted_request_are_dropped() -> None:
    drive = tiered_drive("cat", loads=False)
    drive.add(make_request("a", 3, "cat"))
    drive.step()
    drive.scheduler.abort("a")
    assert not drive.end_load("cat")
    drive.expect_nothing_left()
    drive.add(make_request("b", 3, "cat"))
    drive.end_load("cat")
    drive.scheduler.abort("b")
    drive.expect_nothing_left()


@pytest.mark.parametrize("is_reset", [False, True])
def test_embeddings_that_return_before_the_runner_drops_them_are_kept(is_reset: bool) -> None:
    drive = tiered_drive("cat", loads=False)
    drive.add(make_request("a", 3, "cat"))
    drive.end_load("cat")
    if is_reset:
        drive.scheduler.reset(prefix=False, encoder=True)
    drive.scheduler.abort("a")
    drive.add(make_request("b", 3, "cat"))
    assert drive.end_load("cat")
    drive.expect_all_answered()
    assert drive.runner.encoded == []


def test_evicted_embeddings_are_loaded_again_after_a_preemption() -> None:
    drive = tiered_drive(num_blocks=8, num_pictures=1, max_model_len=28, caches_prefixes=False)
    drive.delivers = True
    endless = {"max_tokens": 15, "ignore_eos": True}
    drive.add(make_request("b", "dog", 3, **endless))
    for _ in range(4):
        drive.step()
    drive.run(make_request("a", "cat", 1, priority=-1, **endless))
    drive.expect_right_answers()
    assert drive.scheduler.pages.num_preemptions
    assert sorted(drive.runner.encoded) == ["cat", "dog"]
    drive.expect_nothing_left()


def test_loaded_embeddings_take_room_of_the_encoder_cache_but_not_the_encoder_s_budget() -> None:
    drive = tiered_drive("cat", "dog", "owl", num_pictures=2, max_num_encoder_input_tokens=6)
    drive.add(make_request("a", 1, "cat", "dog", 1, "owl"))
    drive.step()
    assert drive.scheduler.media.encoder_cache.num_entries == 2
    assert not drive.scheduler.media.encodings.are_given
    drive.expect_all_answered()
    assert drive.runner.encoded == []


def test_items_covered_by_the_prefix_cache_are_not_loaded() -> None:
    drive = tiered_drive("cat", num_pictures=1)
    drive.run(make_request("a", 2, "cat", 4))
    drive.scheduler.reset(prefix=False, encoder=True)
    drive.tier.clear()
    drive.run(make_request("b", 2, "cat", 4))
    assert drive.needed == []
    drive.expect_right_answers()


def test_embeddings_loaded_before_a_reset_are_not_used_after_it() -> None:
    drive = tiered_drive("cat", loads=False)
    drive.add(make_request("a", 3, "cat"))
    drive.end_load("cat")
    drive.scheduler.reset(prefix=False, encoder=True)
    drive.tier.clear()
    drive.loads = True
    drive.step()
    drive.step()
    assert drive.needed == [("a", "cat")]
    drive.deliver("cat")
    drive.expect_all_answered()


def test_media_of_entries_in_tiers_are_held() -> None:
    drive = tiered_drive()
    drive.scheduler.reported.note_embeddings(["cat", "cat", "dog"], [])
    drive.step()
    assert drive.believed == {"cat", "dog"}
    drive.scheduler.reported.note_embeddings([], ["cat", "dog"])
    drive.step()
    assert drive.believed == {"cat"}
