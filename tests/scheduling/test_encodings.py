"""Order in which claimed items are given to the runner, and how many at a time."""

import pytest

from keepsight.scheduling.encodings import Encodings
from keepsight.scheduling.request_state import EncoderTurn
from keepsight.scheduling.step_plan import Encoding
from tests.scheduling.drive import make_config


def encodings_of(*, most_at_once: int = 100, most_beside_largest: int = 10) -> Encodings:
    """Most tests use items of ten tokens, so two are given at a time."""
    config = make_config(
        max_num_encoder_input_tokens=most_at_once,
        max_num_batched_tokens=most_beside_largest,
        max_num_seqs=1,
        cuts_items=True,
    )
    return Encodings(config.scheduler)


def add(
    encodings: Encodings, name: str, count: int = 1, *, num_tokens: int = 10, number: int = 0, priority: int = 0
) -> EncoderTurn:
    """Add all items of one request that arrives now: "name 0", "name 1"."""
    turn = encodings.turn_of((priority, number), num_tokens * count)
    for index in range(count):
        encodings.add(Encoding(f"{name} {index}", f"hash of {name} {index}", num_tokens), turn)
    return turn


def take(encodings: Encodings) -> list[str]:
    return [each.encoder_key for each in encodings.take()]


def make_next(encodings: Encodings) -> list[str]:
    """Finish what the runner was given. Return what it is given next."""
    for each in list(encodings.given()):
        encodings.end(each.encoder_key)
    return take(encodings)


def make_all(encodings: Encodings) -> list[str]:
    """Return the names of the requests whose items are made, in order."""
    made: list[str] = []
    while taken := make_next(encodings):
        encodings.check_invariants()
        made += [each.partition(" ")[0] for each in taken]
    return made


# Turns --------------------------------------------------------------------------------------------------------


def test_a_picture_is_given_before_the_rest_of_a_film_that_came_earlier() -> None:
    encodings = encodings_of()
    add(encodings, "film", 8)
    assert take(encodings) == ["film 0", "film 1"]
    add(encodings, "picture", number=1)
    assert make_next(encodings) == ["picture 0", "film 2"]


def test_films_of_the_same_length_follow_each_other() -> None:
    encodings = encodings_of()
    for number in range(3):
        add(encodings, f"film{number}", 4, number=number)
    assert make_all(encodings) == [f"film{number}" for number in range(3) for _ in range(4)]


def test_a_film_waits_for_no_newcomer_once_as_much_was_given_as_it_needs() -> None:
    encodings = encodings_of(most_beside_largest=1)
    add(encodings, "film", 5)
    made: list[str] = []
    for number in range(1, 20):
        # One arrives for each that is made: together they are as much as the encoder can do.
        add(encodings, f"picture{number}", number=number)
        made += [each.partition(" ")[0] for each in make_next(encodings)]
    assert made[:9] == [*(f"picture{number}" for number in range(1, 5)), *["film"] * 5]


def test_urgent_items_come_first_whatever_their_size() -> None:
    encodings = encodings_of()
    add(encodings, "picture")
    add(encodings, "film", 4, number=1, priority=-1)
    assert make_all(encodings) == [*["film"] * 4, "picture"]


def test_an_item_two_requests_want_is_made_in_the_earlier_turn_of_both() -> None:
    encodings = encodings_of(most_beside_largest=1)
    late = add(encodings, "film", 8)
    picture = encodings.turn_of((0, 1), 10)
    encodings.move_up("film 7", picture)
    encodings.move_up("film 7", late)
    assert take(encodings) == ["film 7"]


# How much is given at a time ----------------------------------------------------------------------------------


def test_beside_the_largest_item_as_much_is_given_as_a_step_computes() -> None:
    encodings = encodings_of(most_beside_largest=20)
    add(encodings, "large", num_tokens=60, priority=-1)
    add(encodings, "picture", 4)
    assert take(encodings) == ["large 0", "picture 0", "picture 1"]
    assert take(encodings) == []


def test_no_more_is_given_than_may_be_encoded_at_the_same_time() -> None:
    encodings = encodings_of(most_at_once=25)
    add(encodings, "picture", 4)
    assert take(encodings) == ["picture 0", "picture 1"]
    assert take(encodings) == []
    encodings.end("picture 0")
    assert take(encodings) == ["picture 2"]


def test_the_first_item_is_given_if_nothing_else_is() -> None:
    encodings = encodings_of(most_at_once=25)
    add(encodings, "large", num_tokens=60)
    assert take(encodings) == ["large 0"]


def test_a_small_item_does_not_take_the_turn_of_one_that_does_not_fit_yet() -> None:
    encodings = encodings_of(most_at_once=25)
    add(encodings, "picture", 2)
    assert take(encodings) == ["picture 0", "picture 1"]
    add(encodings, "large", num_tokens=20, priority=-1)
    add(encodings, "small", num_tokens=1)
    encodings.end("picture 0")
    assert take(encodings) == []
    encodings.end("picture 1")
    assert take(encodings) == ["large 0", "small 0"]


# Items that were left out or have ended -----------------------------------------------------------------------


def test_an_item_that_was_left_out_waits_again_in_its_old_turn() -> None:
    encodings = encodings_of(most_beside_largest=1)
    add(encodings, "film", 3)
    assert take(encodings) == ["film 0"]
    encodings.take_back("film 0")
    assert encodings.waits("film 0")
    assert not encodings.are_given
    add(encodings, "picture", 4, number=1)
    assert make_all(encodings) == [*["film"] * 3, *["picture"] * 4]


@pytest.mark.parametrize("is_given", [False, True])
def test_an_ended_encoding_releases_its_pixels_unless_another_needs_them(is_given: bool) -> None:
    encodings = encodings_of()
    turn = encodings.turn_of((0, 0), 20)
    for key in ("plain", "adapted"):
        encodings.add(Encoding(key, "cat", 10), turn)
    if is_given:
        take(encodings)
    assert encodings.end("plain").encoder_key == "plain"
    assert encodings.need_pixels("cat")
    encodings.end("adapted")
    assert not encodings.need_pixels("cat")
    assert "plain" not in encodings
    encodings.check_invariants()
