"""Reading data URLs; behavior that both base64 decoders share is tested with both."""

import base64
from typing import Any

import pybase64
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepsight.errors import MediaTooLargeError, UnreadablePictureError
from keepsight.frontend.intake import read_data_url as module
from keepsight.frontend.intake.read_data_url import read_data_url
from keepsight.frontend.prompt.lift_data_urls import LiftedUrl

DECODERS = [base64.b64decode, pybase64.b64decode]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize("num_bytes", range(8, 14))
def test_the_limit_is_exact(num_bytes: int, decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content that cannot fit the limit is refused undecoded; near the limit, the caller measures."""
    monkeypatch.setattr(module, "b64decode", decode)
    url = f"data:;base64,{base64.b64encode(bytes(num_bytes)).decode()}"
    assert read_data_url(url, "url", num_bytes) == bytes(num_bytes)
    for max_bytes in range(num_bytes - 3):
        with pytest.raises(MediaTooLargeError, match=f"more than the {max_bytes} bytes"):
            read_data_url(url, "url", max_bytes)


def test_percent_encoded_content_has_the_limit_too() -> None:
    assert read_data_url("data:,%00%00%00", "url", 3) == bytes(3)
    with pytest.raises(MediaTooLargeError):
        read_data_url("data:," + "%00" * 4, "url", 3)


@example(text="0000=")
@example(text="0000====")
@example(text="000=")
@given(text=st.text("aA0+/=-_ \n%,é", max_size=12) | st.from_regex(r"[aA0+/]{4,9}={0,5}", fullmatch=True))
def test_both_decoders_take_and_refuse_the_same(text: str) -> None:
    results = []
    for decode in DECODERS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "b64decode", decode)
            try:
                results.append(read_data_url(f"data:;base64,{text}", "url"))
            except UnreadablePictureError as error:
                results.append(type(error).__name__.encode())
    assert results[0] == results[1]


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t"])
def test_content_in_several_lines_is_told_so(space: str) -> None:
    for encoded in (f"AAAA{space}AAAA", f"AAAA{space}" + "A" * (4 - len(space)), f"AAAA{space}AAA==="):
        urls = [f"data:;base64,{encoded}", LiftedUrl.of(memoryview(f"data:;base64,{encoded}".encode()))]
        for url in urls:
            with pytest.raises(UnreadablePictureError, match="holds a line break or a space: send it in one line"):
                read_data_url(url, "url")


@pytest.mark.parametrize(
    ("encoded", "fault"),
    [
        ("AAAA,AAAA", "send a film as it is"),
        ("AAA%3D", "percent-encoded"),
        ("AAA_", "URL-safe alphabet"),
        ("-AAA", "URL-safe alphabet"),
    ],
)
def test_another_encoding_than_plain_base64_is_told(encoded: str, fault: str) -> None:
    with pytest.raises(UnreadablePictureError, match=fault):
        read_data_url(f"data:;base64,{encoded}", "url")


@pytest.mark.parametrize("head", ["data:image/png; base64", "data:image/png;charset=utf-8; BASE64", "data:; base64 "])
def test_base64_may_be_announced_after_a_space(head: str) -> None:
    assert read_data_url(f"{head},AAAA", "url") == bytes(3)


def test_only_invalid_base64_is_searched_for_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module, "_find_fault")
    assert read_data_url("data:;base64,AAAA", "url") == bytes(3)
