from random import Random

import pytest

from keepsight.demo.scenes import (
    MAX_THINGS,
    POSITIONS,
    STYLES,
    Scene,
    plain_look,
    random_number_scene,
    random_scene,
)


def scenes(num_things: int) -> list[Scene]:
    random = Random(num_things)
    return [random_scene(random, num_things) for _ in range(200)]


def test_the_same_seed_gives_the_same_scene() -> None:
    assert random_scene(Random(5), 3) == random_scene(Random(5), 3)
    assert random_scene(Random(5), 3) != random_scene(Random(6), 3)


@pytest.mark.parametrize("num_things", range(1, MAX_THINGS + 1))
def test_every_thing_has_a_cell_of_its_own_in_reading_order(num_things: int) -> None:
    for scene in scenes(num_things):
        cells = [thing.cell for thing in scene.things]
        assert len(cells) == num_things
        assert cells == sorted(set(cells))


@pytest.mark.parametrize("num_things", range(1, MAX_THINGS + 1))
def test_the_center_of_a_thing_lies_in_its_cell(num_things: int) -> None:
    for scene in scenes(num_things):
        for thing in scene.things:
            assert thing.cell == int(thing.y * 3) * 3 + int(thing.x * 3)
            assert thing.position == POSITIONS[thing.cell]


def test_shape_and_colour_can_be_chosen() -> None:
    scene = random_scene(Random(1), 4, shape="star", colour="pink")
    assert {(thing.shape, thing.colour) for thing in scene.things} == {("star", "pink")}


def test_a_hollow_circle_is_never_drawn_because_it_would_be_a_ring() -> None:
    random = Random(2)
    hollow = [random_scene(random, 4, look=plain_look(100, "hollow")) for _ in range(100)]
    assert not {thing.shape for scene in hollow for thing in scene.things} & {"circle", "ring"}


def test_styles_that_are_held_out_never_come_by_chance() -> None:
    styles = {scene.look.style for num_things in (1, 2, 3) for scene in scenes(num_things)}
    assert styles == set(STYLES) - {"striped", "shadowed"}


@pytest.mark.parametrize("num_digits", [1, 2, 3])
def test_a_number_has_as_many_digits_as_asked_for(num_digits: int) -> None:
    scene = random_number_scene(Random(3), num_digits=num_digits)
    assert scene.number is not None
    assert len(str(scene.number.value)) == num_digits
    assert scene.things == ()
