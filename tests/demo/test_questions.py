from dataclasses import replace
from random import Random

import pytest

from keepsight.demo.questions import Asker, describe_scene, mention_scene, plural, questions_about, questions_about_all
from keepsight.demo.scenes import Scene, Thing, number_scene, plain_look, random_scene
from keepsight.demo.wordings import WORDINGS
from off_script import HELD_OUT_PROMPTS, TRAINED_PROMPTS
from other_questions import follow_up_description, follow_ups_about

LOOK = plain_look(100)


def thing(colour: str, shape: str, cell: int, size: str = "small") -> Thing:
    return Thing(shape, colour, size, cell, 0.5, 0.5, 0.1, (0, 0, 0), 0.0)


ORANGE_STAR = Scene((thing("orange", "star", 2, "large"),), None, LOOK)
THREE = Scene((thing("red", "ring", 0), thing("red", "star", 4), thing("blue", "ring", 8)), None, LOOK)
NUMBER = number_scene(Random(1), 407, look=LOOK)


def question_answer_pairs(scene: Scene, kind: str, ordinal: str | None = None) -> set[tuple[str, str]]:
    random = Random(1)
    questions = [each for _ in range(60) for each in questions_about(scene, Asker(random, ordinal))]
    return {(each.text, each.answer) for each in questions if each.kind == kind}


def test_one_thing_is_described_with_size_colour_shape_and_position() -> None:
    assert describe_scene(ORANGE_STAR) == "A large orange star at the top right."


def test_several_things_are_listed_in_reading_order() -> None:
    assert describe_scene(THREE) == "A red ring, a red star and a blue ring."


def test_a_number_is_read_back() -> None:
    assert describe_scene(NUMBER) == "The number 407."
    assert mention_scene(NUMBER) == "the number 407"


def test_words_that_begin_with_a_vowel_get_an_an() -> None:
    assert mention_scene(ORANGE_STAR) == "an orange star"


def test_the_plural_of_cross_is_crosses() -> None:
    assert (plural("cross"), plural("ring")) == ("crosses", "rings")


def test_shapes_of_one_kind_are_counted() -> None:
    counted = question_answer_pairs(THREE, "count_shape")
    assert ("How many rings are there?", "Two.") in counted
    assert ("How many stars are there?", "One.") in counted


def test_only_unique_things_are_asked_for_by_name() -> None:
    assert {answer for _, answer in question_answer_pairs(THREE, "colour_of")} == {"Red."}
    assert {answer for _, answer in question_answer_pairs(THREE, "shape_of")} == {"A ring."}


def test_an_empty_cell_holds_nothing() -> None:
    pairs = question_answer_pairs(THREE, "at")
    assert ("What is at the center?", "A red star.") in pairs
    assert {answer for text, answer in pairs if text == "What is at the top?"} <= {"Nothing."}


def test_existence_questions_are_answered_truthfully() -> None:
    pairs = question_answer_pairs(THREE, "exist")
    assert ("Is there a red ring?", "Yes.") in pairs
    assert all(answer == "No." for text, answer in pairs if "heart" in text)


def test_a_picture_without_a_number_has_no_number() -> None:
    assert {answer for _, answer in question_answer_pairs(ORANGE_STAR, "no_number")} == {"There is no number."}


def test_the_place_of_a_picture_is_named_where_there_are_several() -> None:
    pairs = question_answer_pairs(ORANGE_STAR, "nth_where", "second")
    assert pairs
    assert all("second" in text for text, _ in pairs)
    assert {answer for _, answer in pairs} == {"Top right."}


def test_a_list_of_pictures_is_numbered() -> None:
    listing = questions_about_all([ORANGE_STAR, NUMBER, THREE], Random(1))[0]
    assert listing.answer == "1: an orange star. 2: the number 407. 3: a red ring, a red star and a blue ring."


def test_a_later_turn_asks_for_more_of_the_same_thing() -> None:
    later = follow_ups_about(ORANGE_STAR.things[0], Random(1))
    assert [each.answer for each in later] == ["Orange.", "A star.", "Large.", "Top right."]


def test_a_later_turn_asks_for_another_picture() -> None:
    question = follow_up_description(THREE, "third", Random(1))
    assert "third" in question.text
    assert question.answer == describe_scene(THREE)


@pytest.mark.parametrize("kind", WORDINGS)
def test_held_out_wordings_are_not_trained(kind: str) -> None:
    assert not set(WORDINGS[kind].trained) & set(WORDINGS[kind].held_out)


def test_held_out_prompts_are_not_trained() -> None:
    assert not set(TRAINED_PROMPTS) & set(HELD_OUT_PROMPTS)


@pytest.mark.parametrize("is_held_out", [False, True])
@pytest.mark.parametrize("ordinal", [None, "first", "last"])
def test_no_question_is_left_with_a_gap(ordinal: str | None, is_held_out: bool) -> None:
    random = Random(9)
    for num_things in (1, 2, 4):
        for _ in range(60):
            asker = Asker(random, ordinal, is_held_out)
            for question in questions_about(random_scene(random, num_things), asker):
                assert not set("{}") & set(question.text + question.answer)
                assert "  " not in question.text
                assert question.text[-1] in "?."


def test_the_style_of_a_scene_changes_no_answer() -> None:
    other = replace(THREE, look=plain_look(300, "striped"))
    assert questions_about(THREE, Asker(Random(1))) == questions_about(other, Asker(Random(1)))
