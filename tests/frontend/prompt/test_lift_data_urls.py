"""Decoding with large data URLs left in the body gives the same result as ordinary decoding."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.decode_body import BodyDecoder
from keepsight.frontend.intake.read_data_url import read_data_url
from keepsight.frontend.prompt.lift_data_urls import (
    MAX_HEAD_BYTES,
    MAX_STRINGS,
    MIN_BYTES,
    LiftedUrl,
    as_data_url,
    decode_lifting,
)
from keepsight.frontend.prompt.read_messages import read_messages

HEAD = "data:image/png;base64,"
LARGE = HEAD + "QUJD" * MIN_BYTES


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    messages: Any
    user: str | None = None


decoder = BodyDecoder(_Request)


def with_part(part: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [part]}]} | fields).encode()


def unlift(value: Any) -> Any:
    if isinstance(value, LiftedUrl):
        return str(value) + bytes(value.content).decode()
    if isinstance(value, dict):
        return {key: unlift(each) for key, each in value.items()}
    return [unlift(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("part", "find"),
    [
        ({"image_url": {"url": LARGE}}, lambda part: part["image_url"]["url"]),
        ({"image_url": LARGE}, lambda part: part["image_url"]),
        ({"image": LARGE}, lambda part: part["image"]),
        ({"url": LARGE}, lambda part: part["url"]),
        ({"audio_url": {"url": LARGE}}, lambda part: part["audio_url"]["url"]),
        ({"input_audio": {"data": LARGE}}, lambda part: part["input_audio"]["data"]),
        ({"source": {"data": LARGE}}, lambda part: part["source"]["data"]),
        ({"file": {"file_data": LARGE}}, lambda part: part["file"]["file_data"]),
        ({"file_data": LARGE}, lambda part: part["file_data"]),
    ],
)
def test_the_url_of_a_picture_is_a_view_of_the_body(part: Any, find: Any) -> None:
    body = with_part(part)
    url = find(decode_lifting(decoder, body).messages[0]["content"][0])
    assert isinstance(url, LiftedUrl)
    assert url.content.obj is body
    assert url == HEAD
    assert read_data_url(url, "url") == read_data_url(LARGE, "url") == b"ABC" * MIN_BYTES


BARE = "QUJD" * MIN_BYTES


@pytest.mark.parametrize(
    ("part", "find"),
    [
        ({"source": {"data": BARE}}, lambda part: part["source"]["data"]),
        ({"input_audio": {"data": BARE, "format": "wav"}}, lambda part: part["input_audio"]["data"]),
        ({"content": [{"source": {"data": BARE}}]}, lambda part: part["content"][0]["source"]["data"]),
    ],
)
def test_base64_alone_is_a_view_of_the_body(part: Any, find: Any) -> None:
    body = with_part(part)
    data = find(decode_lifting(decoder, body).messages[0]["content"][0])
    assert data.content.obj is body
    url = as_data_url("image/png", data)
    assert url == HEAD
    assert read_data_url(url, "url") == read_data_url(as_data_url("image/png", BARE), "url") == b"ABC" * MIN_BYTES


def test_a_data_url_in_the_place_of_base64_stays_as_it_is() -> None:
    [part] = decode_lifting(decoder, with_part({"source": {"data": LARGE}})).messages[0]["content"]
    for data in (LARGE, "DATA:;base64,QUJD", part["source"]["data"]):
        assert as_data_url("image/jpeg", data) is data


@pytest.mark.parametrize(
    "body",
    [
        with_part({"type": "text", "text": f'"data": "{BARE}"'}),
        with_part({"source": {"data": ["data", BARE]}}),
        with_part({"source": {"data": BARE + "\n"}}),
        with_part({"source": {"data": LARGE.upper()}}),
        with_part({"input_audio": {"data": "https://a.example/" + BARE}}),
        with_part({"source": {"type": "text", "media_type": "text/plain", "data": BARE}}),
        with_part({'"data': BARE}),
        with_part({"data": 3}, user=BARE),
    ],
)
def test_strings_with_more_than_base64_are_decoded_as_usual(body: bytes) -> None:
    assert decode_lifting(decoder, body) == decoder.decode(body)


QUOTED = f'he said "{LARGE}" and "{LARGE}'


@pytest.mark.parametrize(
    "body",
    [
        with_part({"type": "text", "text": LARGE}),
        with_part({"type": "text", "text": QUOTED}),
        with_part({"image_url": {"url": LARGE}}, user=LARGE),
        with_part({"image_url": {"url": HEAD + "QUJD"}}),
        with_part({"image_url": {"url": LARGE.replace(";base64", "")}}),
        with_part({"image_url": {"url": LARGE + "\n" + LARGE}}),
        with_part({LARGE: 1}),
        b'{"messages": "' + LARGE.encode() + b'"}',
        b'{"messages": ["\\\\", "' + LARGE.encode() + b'"]}',
    ],
)
def test_other_strings_are_decoded_as_usual(body: bytes) -> None:
    assert decode_lifting(decoder, body) == decoder.decode(body)


@pytest.mark.parametrize("num_before", [0, MAX_STRINGS - 1, MAX_STRINGS])
def test_urls_are_looked_for_among_so_many_strings_and_no_more(num_before: int) -> None:
    short = [{"image_url": HEAD}] * num_before
    body = json.dumps({"messages": [{"content": [*short, {"image_url": LARGE}]}]}).encode()
    url = decode_lifting(decoder, body).messages[0]["content"][-1]["image_url"]
    assert isinstance(url, LiftedUrl) == (num_before < MAX_STRINGS)
    assert unlift(url) == LARGE


@pytest.mark.parametrize("cut", ['"', "}", "]", '"messages": ', "[{"])
def test_a_damaged_body_is_refused_in_the_same_words(cut: str) -> None:
    whole = with_part({"image_url": {"url": LARGE}})
    for body in (whole.replace(cut.encode(), b"", 1), whole + cut.encode(), whole.replace(b'{"url": "', b'{"url": ""')):
        with pytest.raises(InvalidArgumentError) as plain:
            decoder.decode(body)
        with pytest.raises(InvalidArgumentError) as lifting:
            decode_lifting(decoder, body)
        assert str(lifting.value) == str(plain.value)


pieces = [LARGE, "\\", '"', '"' + LARGE, "data:", "DATA:;base64,", "https://a.example/", ",", "é", ":", "{"]
texts = st.lists(st.sampled_from(pieces), max_size=4).map("".join)
names = st.sampled_from(["url", "image_url", "text", "data", "source", "input_audio", "file", "file_data", "content"])
values = st.recursive(
    texts | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
    max_leaves=5,
)


@given(values=st.lists(values, max_size=3), user=texts)
def test_any_body_says_the_same_with_its_urls_put_back(values: list[Any], user: str) -> None:
    messages = [{"role": "user", "content": values}, *values]
    body = json.dumps({"messages": messages, "user": user}, ensure_ascii=False).encode()
    decoded = decode_lifting(decoder, body)
    assert unlift(decoded.messages) == messages
    assert decoded.user == user


HEADS = [
    HEAD,
    "DATA:;base64,",
    "data:;base64 ,",
    "data:,",
    "data:é;base64,",
    "https://a.example/",
    "media://",
    "x:",
    "",
]
# In these the marker or a colon is the last within the limit of a head, or the first beyond it.
FILLED = [f"data:{'a' * (MAX_HEAD_BYTES - len('data:;base64,') + more)};base64," for more in (0, 1)]
LATE = ["A" * (MAX_HEAD_BYTES - 1 + more) + ":" for more in (0, 1)]


@pytest.mark.parametrize("place", ["input_audio.data", "audio_url.url", "image_url.url", "file.file_data"])
def test_whatever_is_in_the_place_of_a_url_is_read_the_same(place: str) -> None:
    outer, inner = place.split(".")
    for head, end in itertools.product([*HEADS, *FILLED, *LATE], ["", "=", "\n", '"', "é", "%41", ":"]):
        body = with_part({"type": outer, outer: {inner: head + BARE + end}})
        for each in (body, body.replace(b"/", b"\\/"), body.replace(b'": "', b'"\n :\t"')):
            assert read(decode_lifting(decoder, each)) == read(decoder.decode(each)), (head, end)


def read(request: _Request) -> object:
    """Return the content that a request has, or how it is refused."""
    try:
        [part] = read_messages(request.messages).pictures
        assert isinstance(part.source, str)
        url = unlift(part.source)
        return read_data_url(part.source, part.field) if url.lower().startswith("data:") else url
    except InvalidArgumentError as error:
        return str(error)
