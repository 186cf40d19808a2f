"""Changes are reported so that a follower knows what is held, and hears nothing twice."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.requests import MediaDropped, MediaHeld
from keepsight.scheduling.holdings import Holdings
from tests.scheduling.drive import Drive, adapter, beside_drive, make_config, make_request
from tests.scheduling.long_run import thorough


def test_the_first_entry_of_a_picture_and_the_end_of_its_last_are_reported() -> None:
    holdings = Holdings()
    holdings.add("cat")
    assert holdings.take_changes() == [MediaHeld(("cat",))]
    holdings.add("cat")
    holdings.remove("cat")
    assert holdings.take_changes() == []
    assert "cat" in holdings
    holdings.remove("cat")
    assert holdings.take_changes() == [MediaDropped(("cat",))]
    assert "cat" not in holdings


def test_a_late_listener_gets_everything_held_and_changes_are_still_reported() -> None:
    holdings = Holdings()
    assert holdings.list_held() == []
    for name in ("cat", "dog", "cat"):
        holdings.add(name)
    assert holdings.list_held() == holdings.list_held() == [MediaHeld(("cat", "dog"))]
    assert holdings.take_changes() == [MediaHeld(("cat", "dog"))]


def test_an_item_that_comes_and_goes_between_two_reports_is_not_reported() -> None:
    holdings = Holdings()
    holdings.add("cat")
    holdings.remove("cat")
    assert holdings.take_changes() == []
    holdings.add("dog")
    holdings.take_changes()
    holdings.remove("dog")
    holdings.add("dog")
    assert holdings.take_changes() == []


def test_all_changes_of_one_kind_are_one_message_in_their_order() -> None:
    holdings = Holdings()
    for media_hash in ("old", "older"):
        holdings.add(media_hash)
    holdings.take_changes()
    for media_hash in ("new", "newer"):
        holdings.add(media_hash)
    for media_hash in ("older", "old"):
        holdings.remove(media_hash)
    assert holdings.take_changes() == [MediaHeld(("new", "newer")), MediaDropped(("older", "old"))]


def test_one_kind_of_change_is_reported_separately_and_with_all_others() -> None:
    holdings = Holdings()
    embeddings = Holdings(within=holdings)
    holdings.add("cat")
    embeddings.add("cat")
    embeddings.add("dog")
    assert embeddings.take_names() == (("cat", "dog"), ())
    assert holdings.take_changes() == [MediaHeld(("cat", "dog"))]
    embeddings.remove("cat")
    assert embeddings.take_names() == ((), ("cat",))
    assert holdings.take_changes() == []
    embeddings.remove("dog")
    assert holdings.take_changes() == [MediaDropped(("dog",))]


def test_an_item_that_is_not_held_cannot_be_removed() -> None:
    with pytest.raises(AssertionError, match="nothing of cat is held"):
        Holdings().remove("cat")


@thorough(200)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take"]), st.sampled_from("abc"))))
def test_a_listener_that_follows_the_changes_knows_what_is_held(events: list[tuple[str, str]]) -> None:
    holdings, counts, believed = Holdings(), Counter[str](), set[str]()
    for event, media_hash in [*events, ("take", "")]:
        if event == "add":
            holdings.add(media_hash)
            counts[media_hash] += 1
        elif event == "remove" and counts[media_hash]:
            holdings.remove(media_hash)
            counts[media_hash] -= 1
        elif event == "take":
            for change in holdings.take_changes():
                changed = set(change.media_hashes)
                assert changed.isdisjoint(believed) if isinstance(change, MediaHeld) else changed <= believed
                believed ^= changed
            assert believed == set(+counts)
        holdings.check_invariants(counts.elements())


# Changes of the engine's caches -------------------------------------------------------------------------------


def test_hints_say_what_the_engine_holds_while_any_cache_holds_anything_of_it() -> None:
    drive = Drive(make_config(num_pictures=1))
    drive.run(make_request("a", 3, "cat", 9))
    assert drive.believed == {"cat"}
    drive.run(make_request("b", 3, "dog", 9))  # its embeddings evict the cat's
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


def test_embeddings_that_an_adapter_changes_are_held_under_the_picture_s_own_name() -> None:
    drive = Drive(make_config(caches_prefixes=False))
    drive.run(make_request("a", 3, "cat", adapter=adapter("digest", changes_encoder=True)))
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


def test_blocks_left_by_a_request_aborted_while_computed_are_held() -> None:
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


def test_nothing_is_held_without_caches() -> None:
    drive = Drive(make_config(shares_embeddings=False, caches_prefixes=False))
    drive.run(make_request("a", 3, "cat", 9))
    assert drive.believed == set()


def test_kept_pixels_count_too_however_often_they_are_reported() -> None:
    drive = Drive(make_config(shares_embeddings=False, caches_prefixes=False))
    for _ in range(2):
        drive.scheduler.reported.note_pixels(["cat", "dog"], [])
    drive.step()
    assert drive.believed == {"cat", "dog"}
    for _ in range(2):
        drive.scheduler.reported.note_pixels([], ["cat", "owl"])
    drive.step()
    assert drive.believed == {"dog"}
