"""Items of the Responses API are read as chat messages; errors name the item's place."""

from typing import Any

import pytest

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.prompt.join_answers import join_answers
from keepsight.frontend.prompt.read_items import read_items
from keepsight.frontend.prompt.read_messages import DocumentPart

URL = "data:image/png;base64,AAAA"
PICTURE = {"type": "input_image", "image_url": URL}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(content: str, **others: Any) -> dict[str, Any]:
    return {"type": "input_text", "text": content, **others}


def test_a_text_is_a_user_s_message() -> None:
    conversation, _ = read_items("Hello")
    assert conversation.messages == [{"role": "user", "content": "Hello"}]


def test_instructions_stand_before_all() -> None:
    conversation, _ = read_items("Hello", "Be short.")
    assert [each["role"] for each in conversation.messages] == ["system", "user"]
    assert read_items("Hello", "")[0] == read_items("Hello")[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Be kind.", "Be short.\n\nBe kind."),
        ([text("Be kind.")], [{"type": "text", "text": "Be short.\n\nBe kind."}]),
        ([PICTURE], [{"type": "text", "text": "Be short."}, {"type": "image", "image": ""}]),
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_and_a_system_s_first_message_are_one(role: str, content: Any, expected: Any) -> None:
    conversation, _ = read_items([{"role": role, "content": content}, user(text("Hi"))], "Be short.")
    assert conversation.messages[0] == {"role": role, "content": expected}
    assert len(conversation.messages) == 2


def test_pictures_keep_their_places_their_names_and_their_pins() -> None:
    parts = [PICTURE | {"uuid": "mine"}, text("and", prompt_cache_breakpoint={"mode": "explicit"}), PICTURE]
    conversation, _ = read_items([user(text("Look")), user(*parts)])
    first, last = conversation.pictures
    assert (first.source, first.field, first.uuid) == (URL, "input[1].content[0].image_url", "mine")
    assert (first.pin_seconds, last.pin_seconds) == (1800.0, 0.0)
    assert conversation.messages[1]["content"] == [
        {"type": "image", "image": ""},
        {"type": "text", "text": "and"},
        {"type": "image", "image": ""},
    ]


def test_an_upload_is_named_by_its_id() -> None:
    [picture] = read_items([user({"type": "input_image", "file_id": "media_1", "detail": "low"})])[0].pictures
    assert (picture.source, picture.field) == ("media://media_1", "input[0].content[0].file_id")


def test_a_file_is_a_document_and_keeps_its_name_and_its_pin() -> None:
    file = {"type": "input_file", "file_data": "data:application/pdf;base64,AAAA", "filename": "a.pdf"}
    conversation, _ = read_items([user(file | {"prompt_cache_breakpoint": {"mode": "explicit"}, "detail": "high"})])
    [document] = conversation.pictures
    assert isinstance(document, DocumentPart)
    assert (document.source, document.name) == ("data:application/pdf;base64,AAAA", "a.pdf")
    assert document.field == "input[0].content[0].file_data"
    assert len(conversation.breakpoints) == 1
    [by_url] = read_items([user({"type": "input_file", "file_url": "https://a.example/a.pdf"})])[0].pictures
    assert (by_url.source, by_url.field) == ("https://a.example/a.pdf", "input[0].content[0].file_url")


def test_calls_belong_to_what_was_said_with_them_and_results_follow() -> None:
    message = {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": [{"token": "I"}]}],
    }
    result = {"type": "function_call_output", "call_id": "c1", "output": [PICTURE, text("the sea")], "id": None}
    items = [user(text("Where?")), message, CALL | {"id": "fc_1", "status": "completed"}, result]
    conversation, _ = read_items(items)
    _, answer, outcome = join_answers(conversation.messages)
    assert answer["content"] == [{"type": "text", "text": "I look."}]
    assert [call["id"] for call in answer["tool_calls"]] == ["c1"]
    assert (outcome["role"], outcome["tool_call_id"]) == ("tool", "c1")
    assert conversation.pictures[0].field == "input[3].output[0].image_url"


def test_calls_and_results_may_be_sent_back_as_openai_s_client_dumps_them() -> None:
    """With all its fields, and with Python's name for one of them."""
    dumped = {"id": "fc_1", "status": "completed", "caller": None, "namespace": None, "created_by": None}
    result = {"type": "function_call_output", "call_id": "c1", "output": "Hi", "name": None}
    conversation, _ = read_items([user(text("Where?")), CALL | dumped | {"async_": None}, result | dumped])
    assert [message["role"] for message in conversation.messages] == ["user", "assistant", "tool"]


def test_calls_alone_are_an_answer_that_says_nothing_else() -> None:
    conversation, _ = read_items([user(text("Where?")), CALL, CALL | {"call_id": "c2"}])
    _, answer = join_answers(conversation.messages)
    assert answer["content"] == ""
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}


def test_a_thought_belongs_to_the_answer_behind_it() -> None:
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "Red."}]}
    conversation, places = read_items([user(text("Where?")), THOUGHT, answer, user(text("And?")), THOUGHT, CALL])
    joined = join_answers(conversation.messages)
    assert [message.get("reasoning_content") for message in joined] == [None, "Hm.", None, "Hm."]
    assert joined[1]["content"] == [{"type": "text", "text": "Red."}]
    assert joined[3]["tool_calls"][0]["id"] == "c1"
    assert places.find("messages[2].content[0].text") == "input[2].content[0].text"
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    assert join_answers(read_items([summary, answer])[0].messages)[0]["reasoning_content"] == "Hm."


def test_a_thought_that_came_to_no_answer_is_a_message_of_its_own() -> None:
    conversation, _ = read_items([user(text("Where?")), THOUGHT, user(text("Go on."))])
    assert conversation.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "Hm."}


def test_each_message_s_place_is_known_by_its_item() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "the sea"}
    _, places = read_items([{"role": "system", "content": "Hi"}, user(text("Where?")), CALL, result], "Be short.")
    assert places.find("messages") == "input"
    assert places.find("messages[0].content") == "input[0].content"
    assert places.find("messages[1].role") == "input[1].role"
    assert places.find("messages[3].content[0].text") == "input[3].output[0].text"
    assert places.find("max_tokens") == "max_tokens"


@pytest.mark.parametrize(
    ("items", "field"),
    [
        (3, "input"),
        ([], "input"),
        ([3], "input[0]"),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input[0].encrypted_content"),
        ([{"type": "reasoning", "content": [{"type": "text", "text": "Hm"}]}], "input[0].content[0].type"),
        ([{"type": "reasoning", "content": []}], "input"),
        ([{"type": ["message"], "role": "user", "content": "Hi"}], "input[0].type"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].id"),
        ([{"id": "msg_1"}], "input[0].id"),
        ([{"id": "msg_1", "content": "Hi"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": 3, "content": "Hi"}], "input[0].role"),
        ([{"role": "tool", "content": "Hi"}], "input[0].role"),
        ([{"role": "user", "content": "Hi", "phase": "commentary"}], "input[0].phase"),
        ([user("Hi")], "input[0].content[0]"),
        ([{"role": "assistant", "content": "Hi", "tool_calls": []}, CALL], "input[0].tool_calls"),
        ([{"role": "assistant", "content": "Hi", "name": "x"}], "input[0].name"),
        ([user({"type": "text", "text": "Hi"})], "input[0].content[0].type"),
        ([user({"type": "input_video", "video_url": "x"})], "input[0].content[0].type"),
        ([user(text("Hi"), text("Hi") | {"text": 3})], "input[0].content[1].text"),
        ([user({"type": "input_image"})], "input[0].content[0].image_url"),
        ([user({"type": "input_image", "image_url": {"url": URL}})], "input[0].content[0].image_url"),
        ([user(PICTURE | {"detail": "huge"})], "input[0].content[0].detail"),
        ([user(PICTURE | {"file_id": "media_1"})], "input[0].content[0].file_id"),
        ([user({"type": "input_image", "file_id": 3})], "input[0].content[0].file_id"),
        ([user({"type": "input_file"})], "input[0].content[0]"),
        ([user({"type": "input_file", "file_id": 3})], "input[0].content[0].file_id"),
        ([user({"type": "input_file", "file_url": URL, "detail": "huge"})], "input[0].content[0].detail"),
        ([user({"type": "input_file", "file_data": "AAAA", "filename": 3})], "input[0].content[0].filename"),
        ([user({"type": "input_file", "file_data": "AAAA", "color": 3})], "input[0].content[0].color"),
        ([user(PICTURE | {"size": 3})], "input[0].content[0].size"),
        ([user(PICTURE | {"uuid": 3})], "input[0].content[0].uuid"),
        ([user({"type": "output_text", "text": "Hi", "annotations": [{}]})], "input[0].content[0].annotations"),
        ([CALL | {"call_id": 3}], "input[0].call_id"),
        ([CALL | {"namespace": "x"}], "input[0].namespace"),
        ([CALL | {"async": True}], "input[0].async"),
        ([CALL | {"async_": True}], "input[0].async_"),
        ([CALL | {"caller": {"type": "program", "caller_id": "p1"}}], "input[0].caller.type"),
        ([{"type": "function_call", "call_id": "c1", "name": "look"}], "input[0].arguments"),
        ([{"type": "function_call_output", "call_id": "c1", "output": "Hi"}], "input[0].call_id"),
        ([CALL, {"type": "function_call_output", "call_id": "c1"}], "input[1].output"),
        ([CALL, {"type": "function_call_output", "call_id": "c1", "output": 3}], "input[1].output"),
        (
            [CALL, {"type": "function_call_output", "call_id": "c1", "output": [text("Hi", x=1)]}],
            "input[1].output[0].x",
        ),
    ],
)
def test_faults_are_told_by_their_place(items: Any, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_items(items)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "content", [[3], [{"type": "nope"}], [text("Hi") | {"text": 3}], [text("Hi"), text("Hi", x=1)]]
)
def test_places_are_the_caller_s_behind_instructions_too(content: list[Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_items([{"role": "system", "content": content}], "Be short.")
    assert caught.value.field.startswith(f"input[0].content[{len(content) - 1}]")
