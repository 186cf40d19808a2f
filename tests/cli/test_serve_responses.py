"""The Responses API: the official client against a real `keepsight serve`."""

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.drawn import ask, by_url, draw
from tests.official_client import answer, connect

PICTURE = draw(7).picture
LOOK = {"type": "input_image", "image_url": draw(7).data_url, "detail": "auto"}
QUESTION = "What is in this picture?"
ITEMS = [{"role": "user", "content": [LOOK, {"type": "input_text", "text": QUESTION}]}]


class Shape(pydantic.BaseModel):
    colour: Literal["red", "orange"]
    number: Literal[1, 2]


COMPACT = {"structured_outputs": {"disable_any_whitespace": True}}
PARAMETERS = Shape.model_json_schema() | {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
TOOL = {"type": "function", "name": "find", "description": "Finds it.", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def client(server_port: int) -> Iterator[openai.OpenAI]:
    with connect(server_port) as client:
        yield client


def respond(client: openai.OpenAI, items: Any, **options: Any) -> Any:
    create: Any = client.responses.create
    return create(**{"model": "keepsight-demo", "input": items, "temperature": 0} | options)


def test_a_picture_is_answered_as_in_a_chat_and_found_in_its_cache_entry(client: openai.OpenAI) -> None:
    answered = answer(client, ask(by_url(PICTURE), QUESTION))
    response = respond(client, ITEMS)
    assert response.output_text == answered
    details = response.usage.input_tokens_details
    assert (details.image_tokens, details.cached_tokens) == (16, response.usage.input_tokens - 1)


def test_a_streamed_response_equals_the_whole_one(client: openai.OpenAI) -> None:
    items: Any = ITEMS
    with client.responses.stream(model="keepsight-demo", input=items, temperature=0) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        response = events.get_final_response()
    assert len(deltas) > 1
    assert "".join(deltas) == response.output_text == respond(client, ITEMS).output_text


def test_all_that_openais_client_requires_is_in_a_response(server_port: int) -> None:
    with connect(server_port, _strict_response_validation=True) as client:
        response = respond(client, ITEMS)
        assert list(respond(client, ITEMS, stream=True))[-1].response.output_text == response.output_text
        called = respond(client, ITEMS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
        result = {"type": "function_call_output", "call_id": called.output[0].call_id, "output": "Found."}
        continued = respond(client, [result], tools=[TOOL], previous_response_id=called.id)
        assert client.responses.retrieve(continued.id) == continued
        assert len(list(client.responses.input_items.list(continued.id))) == 3


def test_a_structured_response_is_valid_and_parsed(client: openai.OpenAI) -> None:
    items: Any = ITEMS
    parsed = client.responses.parse(
        model="keepsight-demo", input=items, temperature=0, text_format=Shape, max_output_tokens=64, extra_body=COMPACT
    )
    assert isinstance(parsed.output_parsed, Shape)


def test_a_tool_call_and_its_result_are_found_in_the_prefix_cache(client: openai.OpenAI) -> None:
    [call] = respond(client, ITEMS, tools=[TOOL], tool_choice="required", parallel_tool_calls=False).output
    assert call.name == "find"
    Shape.model_validate_json(call.arguments)
    output = [LOOK, {"type": "input_text", "text": "This is all."}]
    turns = [*ITEMS, call, {"type": "function_call_output", "call_id": call.call_id, "output": output}]
    response = respond(client, turns, tools=[TOOL], max_output_tokens=32)
    assert response.output_text
    # All is cached except the tool result with its picture, and less than a block.
    assert response.usage.input_tokens_details.cached_tokens > response.usage.input_tokens / 2
    assert response.usage.input_tokens_details.image_tokens == 32


def test_a_conversation_continues_without_resending_its_picture(client: openai.OpenAI) -> None:
    first = respond(client, ITEMS)
    second = respond(client, "What color is it?", previous_response_id=first.id)
    whole = respond(client, [*ITEMS, *first.output, {"role": "user", "content": "What color is it?"}], store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert client.responses.retrieve(second.id).output_text == second.output_text
    listed: Any = [*client.responses.input_items.list(second.id, order="asc", limit=2)]  # in two pages
    assert [each.content[0].type for each in listed] == ["input_image", "output_text", "input_text"]
    assert (listed[1], listed[2].content[0].text) == (first.output[0], "What color is it?")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        respond(client, "And?", previous_response_id=second.id)


def test_the_input_s_tokens_are_counted(client: openai.OpenAI) -> None:
    count: Any = client.responses.input_tokens.count
    counted = count(model="keepsight-demo", input=ITEMS)
    assert counted.input_tokens == respond(client, ITEMS, max_output_tokens=1).usage.input_tokens


def test_errors_are_the_official_client_s_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, [{"role": "user", "content": [LOOK | {"image_url": "data:image/png;base64,AAAA"}]}])
    assert caught.value.param == "input[0].content[0].image_url"
