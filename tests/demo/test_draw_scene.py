from dataclasses import replace
from random import Random

import pytest
from PIL import Image, ImageChops

from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.scenes import (
    BACKGROUNDS,
    SHAPES,
    STYLES,
    Background,
    Scene,
    number_scene,
    plain_look,
    random_scene,
)

WHITE = (255, 255, 255)


def scene_in_style(style: str) -> Scene:
    return random_scene(Random(4), 3, shape="square", look=plain_look(120, style))


def num_changed_pixels(picture: Image.Image) -> int:
    blank = Image.new("RGB", picture.size, WHITE)
    difference = ImageChops.difference(picture, blank).convert("L")
    return picture.width * picture.height - difference.histogram()[0]


@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_drawn_differently(style: str) -> None:
    picture = draw_scene(scene_in_style(style))
    assert picture.size == (120, 120)
    others = [draw_scene(scene_in_style(other)) for other in STYLES if other != style]
    assert all(ImageChops.difference(picture, other).getbbox() for other in others)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_filled_shape_has_its_colour_and_lies_in_its_cell(shape: str) -> None:
    scene = random_scene(Random(8), 1, shape=shape, look=plain_look(300))
    picture = draw_scene(scene)
    thing = scene.things[0]
    box = ImageChops.difference(picture, Image.new("RGB", picture.size, WHITE)).getbbox()
    assert box is not None
    assert abs((box[0] + box[2]) / 600 - thing.x) < 0.02
    assert abs((box[1] + box[3]) / 600 - thing.y) < 0.03
    assert {colour for _, colour in picture.getcolors() or []} == {WHITE, thing.rgb}


@pytest.mark.parametrize("kind", BACKGROUNDS)
def test_every_background_can_be_drawn(kind: str) -> None:
    scene = random_scene(Random(1), 2)
    background = Background(kind, WHITE, (200, 200, 200))
    picture = draw_scene(replace(scene, look=replace(plain_look(120), background=background)))
    assert picture.size == (120, 120)


def test_noise_and_artefacts_are_the_same_every_time() -> None:
    scene = random_scene(Random(1), 2)
    look = replace(plain_look(150), noise=15.0, jpeg_quality=60)
    spoilt = replace(scene, look=look)
    assert draw_scene(spoilt).tobytes() == draw_scene(spoilt).tobytes()
    assert draw_scene(spoilt).tobytes() != draw_scene(replace(spoilt, look=plain_look(150))).tobytes()


def test_a_longer_number_covers_more_of_the_picture() -> None:
    covered = [
        num_changed_pixels(draw_scene(number_scene(Random(1), value, look=plain_look(200)))) for value in (8, 88, 888)
    ]
    assert 0 < covered[0] < covered[1] < covered[2]


def test_a_picture_need_not_be_square() -> None:
    scene = random_scene(Random(1), 2, look=replace(plain_look(100), width=180))
    assert draw_scene(scene).size == (180, 100)
