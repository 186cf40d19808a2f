import base64
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from keepsight.errors import InvalidArgumentError, UnreadablePictureError, UnsupportedFieldError
from keepsight.frontend.intake.fetch_media import fetch_url, freeze, take_source

FIELD = "messages[0].content[0].image_url.url"


@given(content=st.binary(max_size=200))
def test_a_data_url_gives_back_its_bytes(content: bytes) -> None:
    encoded = base64.b64encode(content).decode()
    for head in ("data:image/png;base64", "data:;base64", "DATA:image/jpeg;name=a;BASE64"):
        assert fetch_url(f"{head},{encoded}", FIELD) == content
    assert fetch_url(f"data:image/png,{quote(content)}", FIELD) == content


def test_bytes_and_pictures_of_this_process_are_taken_as_they_are() -> None:
    picture = Image.new("RGB", (2, 2))
    assert take_source(picture, FIELD) is picture
    for content in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert take_source(content, FIELD) == b"abc"
        assert type(take_source(content, FIELD)) is bytes


@pytest.mark.parametrize("transparency", [np.uint8(3), (np.int64(1), 2, 3), [1, 2, 3], 0.5, "3", np.arange(3)])
def test_a_transparency_that_has_no_name_is_refused_by_its_field(transparency: object) -> None:
    picture = Image.new("P", (2, 2))
    picture.info["transparency"] = transparency
    with pytest.raises(InvalidArgumentError, match=r"has the transparency .* must be an integer") as caught:
        freeze(picture, FIELD)
    assert caught.value.field == FIELD


@pytest.mark.parametrize("transparency", [None, 3, (1, 2, 3), b"\0\1"])
def test_whatever_pillow_itself_reads_as_a_transparency_is_kept(transparency: object) -> None:
    picture = Image.new("P", (2, 2))
    picture.info["transparency"] = transparency
    frozen = freeze(picture, FIELD)
    assert isinstance(frozen, Image.Image)
    assert frozen.info["transparency"] == transparency


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:",
        "data:;base64,a",
        "data:;base64,a=bc",
        "data:;base64,aGk=\n!",
        "data:;base64,aGk-_w==",
        "data:;base64,é",
        "data:,\ud800",
    ],
)
def test_a_broken_data_url_is_refused_by_its_field(url: str) -> None:
    with pytest.raises(UnreadablePictureError) as caught:
        fetch_url(url, FIELD)
    assert caught.value.field == FIELD
    assert "data: URL" in caught.value.message


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP", "file", "ftp", "javascript"])
def test_other_urls_are_refused_by_their_scheme(scheme: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=f"{scheme.lower()}: URLs are not supported") as caught:
        fetch_url(f"{scheme}://example.org/a.png", FIELD)
    assert (caught.value.field, caught.value.code) == (FIELD, "unsupported_field")


@pytest.mark.parametrize("text", ["cat.png", "C_drive", "/tmp/cat.png", "aGVsbG8=", " data:image/png;base64,aGVsbG8="])
def test_a_text_that_is_no_url_is_not_called_one(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not a URL.*data:") as caught:
        fetch_url(text, FIELD)
    assert caught.value.field == FIELD


def test_a_path_is_named_in_full_with_the_ways_to_send_a_file() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'/tmp/pictures/of/the/cat\.png' is not a URL.*as its bytes"):
        fetch_url("/tmp/pictures/of/the/cat.png", FIELD)
    with pytest.raises(InvalidArgumentError, match="must be a URL, a file's bytes, a PIL image"):
        take_source(Path("cat.png"), FIELD)


def test_a_long_text_that_is_no_url_is_cut() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'aaaaaaaaaaaaaaaaaaaa'\.\.\. is not a URL"):
        fetch_url("a" * 1_000_000, FIELD)


@pytest.mark.parametrize("source", [None, 5, ["data:,"], object()])
def test_other_objects_are_refused_by_their_type(source: object) -> None:
    with pytest.raises(InvalidArgumentError, match=f"not {type(source).__name__}"):
        take_source(source, FIELD)
