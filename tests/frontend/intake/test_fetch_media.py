"""The content of `data:` URLs; any other text is refused with what to send instead."""

import base64
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import InvalidArgumentError, UnreadablePictureError, UnsupportedFieldError
from keepsight.frontend.intake.fetch_media import fetch_data_url

FIELD = "messages[0].content[0].image_url.url"
MAX_BYTES = 2**20


@given(content=st.binary(max_size=200))
def test_a_data_url_gives_back_its_bytes(content: bytes) -> None:
    encoded = base64.b64encode(content).decode()
    for head in ("data:image/png;base64", "data:;base64", "DATA:image/jpeg;name=a;BASE64"):
        assert fetch_data_url(f"{head},{encoded}", FIELD, MAX_BYTES) == content
    assert fetch_data_url(f"data:image/png,{quote(content)}", FIELD, MAX_BYTES) == content


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
        fetch_data_url(url, FIELD, MAX_BYTES)
    assert caught.value.field == FIELD
    assert "data: URL" in caught.value.message


@pytest.mark.parametrize("scheme", ["http", "https", "HTTP", "file", "ftp", "javascript"])
def test_other_urls_are_refused_by_their_scheme(scheme: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=f"{scheme.lower()}: URLs are not supported") as caught:
        fetch_data_url(f"{scheme}://example.org/a.png", FIELD, MAX_BYTES)
    assert (caught.value.field, caught.value.code) == (FIELD, "unsupported_field")


@pytest.mark.parametrize("text", ["cat.png", "C_drive", "/tmp/cat.png", "aGVsbG8=", " data:image/png;base64,aGVsbG8="])
def test_a_text_that_is_no_url_is_not_called_one(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"not a URL.*data:") as caught:
        fetch_data_url(text, FIELD, MAX_BYTES)
    assert caught.value.field == FIELD


def test_a_path_is_named_in_full_with_the_ways_to_send_a_file() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'/tmp/pictures/of/the/cat\.png' is not a URL.*as its bytes"):
        fetch_data_url("/tmp/pictures/of/the/cat.png", FIELD, MAX_BYTES)


def test_a_long_text_that_is_no_url_is_cut() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'aaaaaaaaaaaaaaaaaaaa'\.\.\. is not a URL"):
        fetch_data_url("a" * 1_000_000, FIELD, MAX_BYTES)
