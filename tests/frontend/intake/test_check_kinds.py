"""A file of another kind than a picture is refused with advice that fits what it is."""

import pytest

from keepsight.errors import PictureError, UnreadablePictureError
from keepsight.frontend.intake.check_kinds import check_is_picture
from keepsight.frontend.intake.read_header import read_geometry
from keepsight.processor_config import NO_PROCESSOR


def boxed(brand: bytes) -> bytes:
    """Return the beginning of a file of MP4 boxes."""
    return (20).to_bytes(4) + b"ftyp" + brand + bytes(8) + (108).to_bytes(4) + b"meta" + bytes(100)


def read(content: bytes) -> None:
    check_is_picture(content, "picture", NO_PROCESSOR)
    read_geometry(content, "picture")


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"heim", b"heis", b"hevc"])
def test_a_heic_is_told_to_be_one(brand: bytes) -> None:
    with pytest.raises(UnreadablePictureError, match=r"none of JPEG, .*, but a HEIC, as phones take: send it as JPEG"):
        read(boxed(brand))


@pytest.mark.parametrize("content", [boxed(b"crx "), "A text.".encode("utf-16")], ids=["raw picture", "UTF-16"])
def test_what_is_no_film_and_no_sound_is_called_neither(content: bytes) -> None:
    with pytest.raises(UnreadablePictureError, match=r"bytes that are none of JPEG, .*PPM$"):
        read(content)


def test_a_music_file_in_mp4_boxes_is_a_sound_and_another_a_film() -> None:
    for brand, message in ((b"M4A ", "is a sound, not a picture"), (b"isom", "is a film, not a picture")):
        with pytest.raises(PictureError, match=message):
            read(boxed(brand))
