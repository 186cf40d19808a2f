"""Anthropic's Messages API: its official client against a real `keepsight serve`."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.drawn import ask, by_url, draw, to_png
from tests.official_client import answer, connect

DRAWN = draw(23)
SOURCE = {"type": "base64", "media_type": "image/png", "data": DRAWN.data_url.partition(",")[2]}
LOOK = {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}
QUESTION = "What is in this picture?"
ASKED = {"role": "user", "content": [LOOK, {"type": "text", "text": QUESTION}]}
COLOURS = {"type": "object", "properties": {"colour": {"enum": ["red", "orange"]}}, "required": ["colour"]}
TOOL = {"name": "find", "description": "Finds it.", "input_schema": COLOURS | {"additionalProperties": False}}


@pytest.fixture(scope="module")
def client(server_port: int) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server_port}", api_key="none", max_retries=0) as client:
        yield client


def complete(client: anthropic.Anthropic, messages: Any, **options: Any) -> Any:
    create: Any = client.messages.create
    terms = {"model": "keepsight-demo", "messages": messages, "max_tokens": 64, "extra_body": {"temperature": 0}}
    return create(**terms | options)


def test_a_picture_is_cached_and_shared_with_chat_completions(client: anthropic.Anthropic, server_port: int) -> None:
    first, second = complete(client, [ASKED]), complete(client, [ASKED])
    assert [block.text for block in first.content] == [block.text for block in second.content] == [DRAWN.description]
    assert (first.stop_reason, second.stop_reason) == ("end_turn", "end_turn")
    num_tokens = client.messages.count_tokens(model="keepsight-demo", messages=[ASKED]).input_tokens  # type: ignore[list-item]
    assert first.usage.input_tokens + first.usage.cache_read_input_tokens == num_tokens
    assert (second.usage.input_tokens, second.usage.cache_read_input_tokens) == (1, num_tokens - 1)
    with connect(server_port) as openai_client:
        assert answer(openai_client, ask(by_url(DRAWN.picture), QUESTION)) == DRAWN.description


def test_a_streamed_message_equals_the_whole_one(client: anthropic.Anthropic) -> None:
    messages: Any = [ASKED]
    with client.messages.stream(
        model="keepsight-demo", messages=messages, max_tokens=64, extra_body={"temperature": 0}
    ) as events:
        texts = list(events.text_stream)
        message = events.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == message.content[0].text == DRAWN.description  # type: ignore[union-attr]
    assert message.usage.cache_read_input_tokens > 0  # type: ignore[operator]


def test_a_tool_call_and_its_result_are_found_in_the_prefix_cache(client: anthropic.Anthropic) -> None:
    called = complete(client, [ASKED], tools=[TOOL], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    [use] = called.content
    assert (called.stop_reason, use.name) == ("tool_use", "find")
    assert use.input["colour"] in ("red", "orange")
    content = [LOOK, {"type": "text", "text": "This is all."}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": content}]}
    message = complete(client, [ASKED, called.to_param(), result], tools=[TOOL], max_tokens=32)
    assert message.content
    # All is cached except the tool result with its picture, and less than a block.
    assert message.usage.cache_read_input_tokens > message.usage.input_tokens


def test_a_file_is_uploaded_once_and_asked_about_by_its_id(client: anthropic.Anthropic, server_port: int) -> None:
    files, picture = client.beta.files, ("a.png", to_png(DRAWN.picture), "image/png")
    file = files.upload(file=picture)
    assert (file.filename, file.mime_type, file.size_bytes) == ("a.png", "image/png", len(picture[1]))
    shown = {"type": "image", "source": {"type": "file", "file_id": file.id}}
    message = complete(client, [{"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]}])
    assert message.content[0].text == DRAWN.description
    others = [files.upload(file=picture, expires_in_seconds=3600) for _ in range(2)]
    assert {file.id, *(each.id for each in others)} <= {each.id for each in files.list(limit=1)}
    assert [each.id for each in files.list(ids=[file.id])] == [file.id]
    assert files.retrieve_metadata(file.id) == file
    assert files.download(file.id).read() == picture[1]
    assert files.delete(file.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError):
        files.retrieve_metadata(file.id)


def test_errors_are_the_official_client_s_exceptions(client: anthropic.Anthropic) -> None:
    wrong = {"role": "user", "content": [LOOK | {"source": SOURCE | {"data": "AAAA"}}]}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.source\.data: "):
        complete(client, [wrong])
