"""What a request is about: its media, the beginnings of its prompt, its cache key, and the ids that it names."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepsight.frontend.http.decode_body import MAX_MARKS_IN_BODY
from keepsight.scaleout.affinity import (
    ANSWER_BYTES,
    MAX_MEDIA,
    MAX_TEXT_BYTES,
    TYPICAL_MEDIA_BYTES,
    Affinity,
    find_affinity,
)

LARGE = "iVBORw0KGgo" * 1000
DATA_URL = f"data:image/png;base64,{LARGE}"
CHAT = "/v1/chat/completions"


def chat(*parts: dict[str, Any], **fields: Any) -> Affinity:
    body = {"messages": [{"role": "user", "content": [*parts]}], **fields}
    return find_affinity(CHAT, json.dumps(body).encode())


def by_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_large_picture_counts_with_its_bytes_and_is_the_same_in_every_form() -> None:
    as_block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": LARGE}}
    in_item = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": DATA_URL}]}]}
    expected = chat(by_url(DATA_URL)).media
    assert list(expected.values()) == [len(LARGE)]
    assert chat(as_block).media == expected
    assert find_affinity("/v1/responses", json.dumps(in_item).encode()).media == expected


def test_media_that_are_only_named_count_as_typical_ones() -> None:
    named = {"type": "image_url", "image_url": None, "uuid": "of mine"}
    for part in (named, by_url("https://a.example/b.png"), {"type": "image", "url": "https://a.example"}):
        assert list(chat(part).media.values()) == [TYPICAL_MEDIA_BYTES]


@pytest.mark.parametrize("picture", ["iVBO", "iVBO/" * 50_000])
def test_pictures_that_are_short_or_have_escapes_count_with_their_bytes_too(picture: str) -> None:
    url = f"data:image/png;base64,{picture}"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    named = by_url("https://a.example")
    for part, text in ((by_url(url), url), (block, picture)):
        body = json.dumps({"messages": [{"content": [part, named, part]}]}).replace("/", r"\/")
        found = find_affinity(CHAT, body.encode())
        assert list(found.media.values()) == [len(text.replace("/", r"\/")), TYPICAL_MEDIA_BYTES]
        assert found.num_bytes < 4000
        assert len(found.beginnings) <= 1


def test_of_bodies_with_more_media_or_text_than_any_request_has_nothing_is_known() -> None:
    many = [by_url(f"https://a.example/{number}") for number in range(MAX_MEDIA)]
    assert len(chat(*many).media) == MAX_MEDIA
    assert chat(*many, by_url("https://b.example")) == Affinity()
    assert chat(*[by_url("https://a.example")] * (MAX_MEDIA + 1)) == Affinity()
    assert chat({"type": "text", "text": "a" * MAX_TEXT_BYTES}) == Affinity()
    assert chat({"type": "text", "text": "[" * MAX_MARKS_IN_BODY[b"["]}) == Affinity()


def test_text_that_looks_like_a_picture_is_none() -> None:
    assert not chat({"type": "text", "text": '{"url": "https://a.example", "image": "b", "file_id": "media_1"}'}).media


@pytest.mark.parametrize(
    "part",
    [
        by_url("media://media_0f"),
        by_url("MEDIA://media_0f"),
        {"type": "input_file", "file_url": "media://media_0f"},
        {"type": "video", "video": "media://media_0f"},
        {"type": "input_audio", "input_audio": {"data": "media://media_0f"}},
        {"type": "image", "media_id": "media_0f"},
        {"type": "file", "file": {"file_id": "media_0f"}},
        {"type": "input_image", "file_id": "media_0f"},
        {"type": "image", "source": {"type": "file", "file_id": "media_0f"}},
    ],
)
def test_uploads_are_named_in_every_form(part: dict[str, Any]) -> None:
    assert chat(part).ids == ("media_0f",)
    assert find_affinity(CHAT, json.dumps({"messages": [part]}).replace("/", r"\/").encode()).ids == ("media_0f",)


@pytest.mark.parametrize(
    "part",
    [
        {**by_url(DATA_URL), "uuid": "media_7"},
        {"type": "image_url", "image_url": None, "uuid": "media://media_7"},
        by_url("media_7"),
        {"type": "input_audio", "input_audio": {"data": "media_7"}},
        {"type": "image", "media_id": "media_7/../resp_1"},
        {
            "type": "tool_use",
            "id": "a",
            "name": "look",
            "input": {"file_id": "media_7", "of": [{"url": "media://media_8"}]},
        },
    ],
)
def test_what_only_looks_like_an_uploads_id_is_none(part: dict[str, Any]) -> None:
    assert chat(part).ids == ()


def test_what_looks_like_an_uploads_id_in_a_tool_is_none() -> None:
    tool = {"name": "look", "input_schema": {"type": "object", "examples": [{"file_id": "media_7"}]}}
    assert chat({"type": "image", "media_id": "media_8"}, tools=[tool]).ids == ("media_8",)


def test_an_upload_is_named_even_if_a_tool_was_called_with_its_id() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"file_id": "media_7", "data": "media://media_7"}}
    assert chat(call, {"type": "image", "media_id": "media_7"}, call).ids == ("media_7",)


@pytest.mark.parametrize("path", ["/v1/media/media_1", "/v1/files/media_1/content", "/v1/media/media_1/pin"])
def test_uploads_are_named_by_paths(path: str) -> None:
    assert find_affinity(path, b"").ids == ("media_1",)


def test_the_uploads_of_one_caller_belong_together() -> None:
    ours, ours_too = find_affinity("/v1/files", b"a", b"key"), find_affinity("/v1/media", b"b", b"key")
    assert ours == ours_too != find_affinity("/v1/files", b"a", b"other")


def test_stored_responses_are_named_by_paths_and_by_what_continues_them() -> None:
    assert find_affinity("/v1/responses/resp_1", b"").ids == ("resp_1",)
    assert find_affinity("/v1/responses/resp_1/input_items", b"").ids == ("resp_1",)
    assert find_affinity("/v1/responses", b'{"previous_response_id": "resp_1", "input": "a"}').ids == ("resp_1",)
    assert find_affinity("/v1/responses/input_tokens", b'{"input": "a"}').ids == ()
    assert find_affinity("/v1/responses", b'{"previous_response_id": 7}').ids == ()


def test_turns_of_a_conversation_and_prompts_after_one_system_text_begin_alike() -> None:
    long = "Answer shortly. " * 100
    system, question = {"role": "system", "content": long}, {"role": "user", "content": "What is it?" * 50}
    first = find_affinity(CHAT, json.dumps({"messages": [system, question], "seed": 1}).encode()).beginnings
    answered = [system, question, {"role": "assistant", "content": "A cat"}, question]
    second = find_affinity(CHAT, json.dumps({"seed": 2, "messages": answered}).encode()).beginnings
    other = find_affinity(CHAT, json.dumps({"messages": [system], "model": "b"}).encode()).beginnings
    assert second[: len(first)] == first
    assert len(first) > 3
    assert other
    assert not set(other) & set(first)
    bodies = [{"system": long, "messages": [{"content": each}], "max_tokens": 1} for each in ("a" * 99, "b" * 99)]
    a, b = (find_affinity("/v1/messages", json.dumps(body).encode()).beginnings for body in bodies)
    assert a[:3] == b[:3] != ()


def test_a_byte_order_mark_changes_nothing() -> None:
    body = json.dumps({"messages": [{"content": [by_url(DATA_URL)]}], "previous_response_id": "resp_a"}).encode()
    affinity = find_affinity(CHAT, body)
    assert affinity.ids
    assert find_affinity(CHAT, b"\xef\xbb\xbf" + body) == affinity


def test_a_pictures_bytes_are_no_part_of_the_prompts_length() -> None:
    assert chat(by_url(DATA_URL)).num_bytes < 3000


def test_the_cache_key_is_read_if_it_is_a_text() -> None:
    assert chat(prompt_cache_key="mine").cache_key == "mine"
    assert chat(prompt_cache_key=7).cache_key is None
    assert chat(prompt_cache_key=None).cache_key is None


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"{", b'{"messages": "a"', b"\xff\xd8" * 99, b"--boundary\r\n", b'{"prompt_cache_key":"\\ud800"}'],
)
def test_any_other_body_has_no_affinity(body: bytes) -> None:
    assert find_affinity(CHAT, body) == Affinity()


def test_a_deeply_nested_body_has_no_affinity() -> None:
    assert find_affinity(CHAT, b'{"messages":' + b"[" * 100_000) == Affinity()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(DATA_URL) | st.just("media_1"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["url", "messages", "uuid"]), inner),
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "tools", "prompt_cache_key", "model", "x"]), JSON))
def test_any_json_has_an_affinity(body: dict[str, Any]) -> None:
    affinity = find_affinity(CHAT, json.dumps(body).encode())
    assert affinity.num_bytes >= ANSWER_BYTES
    assert all(affinity.media.values())


@given(st.binary())
def test_any_bytes_have_an_affinity(body: bytes) -> None:
    assert find_affinity(CHAT, b'{"messages":' + body).num_bytes >= ANSWER_BYTES
