"""Clients' uuids for pictures, and pictures that are left out because their uuid is known."""

from typing import Any

import pytest
from PIL import Image

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.frontend.prompt.read_messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_UUID_LENGTH,
    PicturePart,
    read_label,
    read_messages,
)
from tests.drawn import ask

AT = "messages[0].content[0]"
PICTURE = Image.new("RGB", (2, 2))


def read_part(part: dict[str, Any]) -> PicturePart:
    [picture] = read_messages(ask(part)).pictures
    return picture


@pytest.mark.parametrize("sources", [{}, {"file_id": "media_1", "file_url": "u"}])
def test_a_file_has_exactly_one_source(sources: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match="must have exactly one of file_data, file_url, file_id") as caught:
        read_messages(ask({"type": "file", "file": sources}))
    assert caught.value.field == f"{AT}.file"


@pytest.mark.parametrize("control", [None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
def test_parts_may_say_how_to_cache_them_as_in_anthropics_api(control: Any) -> None:
    text, picture = {"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": "u"}
    marked = read_messages(ask({**text, "cache_control": control}, {**picture, "cache_control": control}))
    assert marked == read_messages(ask(text, picture))
    with pytest.raises(UnsupportedFieldError) as caught:
        read_messages(ask({**text, "cache_control": {"type": "ephemeral", "for": "ever"}}))
    assert caught.value.field == f"{AT}.cache_control.for"


@pytest.mark.parametrize(
    ("part", "source", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "u"}}, "u", f"{AT}.image_url.url"),
        ({"type": "image_url", "image_url": "u"}, "u", f"{AT}.image_url"),
        ({"type": "image_url", "image_url": None}, None, f"{AT}.image_url"),
        ({"type": "image_url", "image_url": {}}, None, f"{AT}.image_url.url"),
        ({"type": "image_url", "image_url": {"url": None}}, None, f"{AT}.image_url.url"),
        ({"type": "image_url", "image_url": {"url": ""}}, None, f"{AT}.image_url.url"),
        ({"type": "image_url", "image_url": ""}, None, f"{AT}.image_url"),
        ({"type": "image_url"}, None, f"{AT}.image_url"),
        ({"type": "image_pil", "image_pil": PICTURE}, PICTURE, f"{AT}.image_pil"),
        ({"type": "image_pil", "image_pil": None}, None, f"{AT}.image_pil"),
        ({"type": "image_pil"}, None, f"{AT}.image_pil"),
        ({"type": "image", "image": PICTURE}, PICTURE, f"{AT}.image"),
        ({"type": "image", "url": "u"}, "u", f"{AT}.url"),
        ({"type": "image", "image": None, "url": None}, None, f"{AT}.image"),
        ({"type": "image"}, None, f"{AT}.image"),
    ],
)
def test_a_picture_may_have_a_uuid_and_then_be_left_out(part: dict[str, Any], source: object, field: str) -> None:
    assert read_part({**part, "uuid": "cat 1"}) == PicturePart(source, field, "cat 1")
    for nameless in (part, {**part, "uuid": None}):
        if source is not None:
            assert read_part(nameless).uuid is None
        else:
            with pytest.raises(InvalidArgumentError) as caught:
                read_part(nameless)
            assert caught.value.field == field


@pytest.mark.parametrize(
    ("part", "source", "field"),
    [
        ({"type": "video_url", "video_url": {"url": "u"}}, "u", f"{AT}.video_url.url"),
        ({"type": "video_url", "video_url": "u"}, "u", f"{AT}.video_url"),
        ({"type": "video", "video": "u"}, "u", f"{AT}.video"),
        ({"type": "video", "video": b"a film"}, b"a film", f"{AT}.video"),
        ({"type": "video", "url": "u"}, "u", f"{AT}.url"),
        ({"type": "video", "media_id": "media_1"}, "media://media_1", f"{AT}.media_id"),
    ],
)
def test_a_film_is_a_part_as_a_picture_is(part: dict[str, Any], source: object, field: str) -> None:
    read = read_messages(ask(part, {"type": "image_url", "image_url": "p"}))
    assert read.pictures[0] == PicturePart(source, field, modality="video")
    assert read.messages[0]["content"] == [{"type": "video", "video": ""}, {"type": "image", "image": ""}]
    assert read_part({**part, "uuid": "cat"}).uuid == "cat"


def test_a_film_has_no_detail() -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        read_part({"type": "video_url", "video_url": {"url": "u", "detail": "low"}})
    assert caught.value.field == f"{AT}.video_url.detail"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([None] * (MAX_MESSAGES + 1), "at most 16384 messages, not 16385"),
        ([{"content": [None] * MAX_PARTS}, {"content": [None]}], "at most 16384 parts in all, not 16385"),
        ([{"tool_calls": [None] * (MAX_PARTS + 1)}], "at most 16384 tool calls in all, not 16385"),
    ],
)
def test_too_many_are_refused_before_any_is_looked_at(messages: list[Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_messages(messages)
    assert caught.value.field == "messages"


def test_as_many_messages_and_parts_as_may_be_are_read() -> None:
    many = read_messages([{"role": "user", "content": "a"}] * (MAX_MESSAGES - 1) + ask(*["b"] * MAX_PARTS))
    assert len(many.messages) == MAX_MESSAGES


@pytest.mark.parametrize("detail", [None, "auto", "low", "high", "original"])
def test_every_detail_that_openai_knows_asks_for_the_one_size_of_picture(detail: str | None) -> None:
    assert read_part({"type": "image_url", "image_url": {"url": "u", "detail": detail}}).source == "u"


@pytest.mark.parametrize("detail", ["medium", "", 1, ["low"]])
def test_another_detail_is_refused_by_name(detail: object) -> None:
    with pytest.raises(InvalidArgumentError, match="one of auto, low, high, original") as caught:
        read_part({"type": "image_url", "image_url": {"url": "u", "detail": detail}})
    assert caught.value.field == f"{AT}.image_url.detail"


@pytest.mark.parametrize("part", [{"image_url": {"url": 5}}, {"image_url": 0}, {"image_url": []}])
def test_a_uuid_excuses_no_broken_url(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_part({"type": "image_url", "uuid": "cat", **part})
    assert caught.value.field.startswith(f"{AT}.image_url")


@pytest.mark.parametrize(
    "uuid", ["", "a" * (MAX_UUID_LENGTH + 1), "a\0", "a\n", "\ud800", "\x7f", "a\u202eb", 5, b"a", ["a"]]
)
def test_a_uuid_is_a_text_that_can_be_shown(uuid: object) -> None:
    with pytest.raises(InvalidArgumentError, match="1 to 256 printable characters") as caught:
        read_part({"type": "image_url", "image_url": "u", "uuid": uuid})
    assert caught.value.field == f"{AT}.uuid"


@pytest.mark.parametrize("uuid", ["a", "a" * MAX_UUID_LENGTH, "Größe 猫", "../etc"])
def test_any_other_text_is_a_uuid(uuid: str) -> None:
    assert read_label(uuid, "uuid") == uuid


@pytest.mark.parametrize("names", [["reasoning"], ["reasoning_content"], ["reasoning", "reasoning_content"]])
def test_an_earlier_thought_is_read_by_either_name(names: list[str]) -> None:
    answer = {"role": "assistant", "content": None} | dict.fromkeys(names, "Hm.")
    assert read_messages([answer]).messages == [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": "a", "reasoning": "Hm.", "reasoning_content": "Oh."}, "reasoning"),
        ({"role": "assistant", "content": "a", "reasoning_content": ["Hm."]}, "reasoning_content"),
        ({"role": "user", "content": "a", "reasoning_content": "Hm."}, "reasoning_content"),
    ],
)
def test_a_thought_is_one_text_and_an_assistant_s(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^messages\[0\]\.{field}: "):
        read_messages([message])


def test_a_message_may_say_that_it_is_a_text_and_nothing_else() -> None:
    message: dict[str, Any] = {"role": "user", "content": "Hello"}
    for kind in ("text", None):
        assert read_messages([message | {"type": kind}]) == read_messages([message])
    for other in ("message", "", {"text": 1}):
        with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\.type: must be 'text'"):
            read_messages([message | {"type": other}])
