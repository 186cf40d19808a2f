"""The EXIF ImageID of a file is found in every form, without decoding the picture."""

import uuid
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile

from keepsight.frontend.identity.exif_image_id import read_image_id
from keepsight.frontend.intake.open_picture import PictureSource
from tests.drawn import draw
from tests.frontend.sample_pictures import encode

IMAGE_ID = uuid.UUID("12345678-9abc-def0-1234-56789abcdef0")


def with_image_id(value: Any, format_: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.ImageID] = value
    return encode(draw(1).picture, format_, exif=exif)


def image_id_of(source: PictureSource) -> uuid.UUID | None:
    return read_image_id(source, "image")


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_it_is_found_in_every_format_that_has_metadata_and_nothing_is_decoded(
    format_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_image_id(str(IMAGE_ID), format_)

    def refuse(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert image_id_of(data) == IMAGE_ID


@pytest.mark.parametrize(
    "value",
    [str(IMAGE_ID), str(IMAGE_ID).upper(), IMAGE_ID.hex, f"{IMAGE_ID}\0", str(IMAGE_ID).encode(), IMAGE_ID.bytes],
)
def test_text_and_bytes_of_one_uuid_are_one(value: str | bytes) -> None:
    assert image_id_of(with_image_id(value)) == IMAGE_ID


@pytest.mark.parametrize("value", ["", "DSC_0001", b"\xff\xfe", b"\xff" * 15, str(uuid.UUID(int=0)), bytes(16), 7])
def test_an_invalid_uuid_and_the_uuid_of_zeros_identify_nothing(value: Any) -> None:
    assert image_id_of(with_image_id(value)) is None


def test_a_picture_of_this_process_may_carry_the_uuid_itself() -> None:
    picture = draw(1).picture.copy()
    assert image_id_of(picture) is None
    picture.getexif()[ExifTags.Base.ImageID] = IMAGE_ID
    assert image_id_of(picture) == IMAGE_ID


def test_what_has_no_metadata_has_none() -> None:
    assert image_id_of(np.zeros((2, 2, 3), np.uint8)) is None
    assert image_id_of(encode(draw(1).picture, "JPEG")) is None
    assert image_id_of(encode(draw(1).picture, "BMP")) is None
