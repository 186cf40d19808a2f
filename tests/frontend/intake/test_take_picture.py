"""Pictures given as Python objects: which are taken, and that `freeze_picture` copies a PIL image."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.intake.take_picture import freeze_picture, take_picture

FIELD = "messages[0].content[0].image_pil"


def test_bytes_and_pictures_of_this_process_are_taken_as_they_are() -> None:
    picture = Image.new("RGB", (2, 2))
    assert take_picture(picture, FIELD) is picture
    for content in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert take_picture(content, FIELD) == b"abc"
        assert type(take_picture(content, FIELD)) is bytes


def test_a_frozen_picture_keeps_its_pixels_when_the_caller_changes_them() -> None:
    picture = Image.new("RGB", (2, 2))
    frozen = freeze_picture(picture, FIELD)
    assert isinstance(frozen, Image.Image)
    assert frozen is not picture
    picture.putpixel((0, 0), (1, 2, 3))
    assert frozen.getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("transparency", [np.uint8(3), (np.int64(1), 2, 3), [1, 2, 3], 0.5, "3", np.arange(3)])
def test_a_transparency_that_has_no_name_is_refused_by_its_field(transparency: object) -> None:
    picture = Image.new("P", (2, 2))
    picture.info["transparency"] = transparency
    with pytest.raises(InvalidArgumentError, match=r"has the transparency .* must be an integer") as caught:
        freeze_picture(picture, FIELD)
    assert caught.value.field == FIELD


@pytest.mark.parametrize("transparency", [None, 3, (1, 2, 3), b"\0\1"])
def test_whatever_pillow_itself_reads_as_a_transparency_is_kept(transparency: object) -> None:
    picture = Image.new("P", (2, 2))
    picture.info["transparency"] = transparency
    frozen = freeze_picture(picture, FIELD)
    assert isinstance(frozen, Image.Image)
    assert frozen.info["transparency"] == transparency


def test_a_path_is_refused_with_what_may_be_sent() -> None:
    with pytest.raises(InvalidArgumentError, match="must be a URL, a file's bytes, a PIL image"):
        take_picture(Path("cat.png"), FIELD)


@pytest.mark.parametrize("source", [None, 5, ["data:,"], object()])
def test_other_objects_are_refused_by_their_type(source: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"not {type(source).__name__}"):
        take_picture(source, FIELD)
