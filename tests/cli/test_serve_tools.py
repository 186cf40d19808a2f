"""Tools: the official client against a real `keepsight serve`, where the grammar makes the demo model call a tool."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests import official_client
from tests.drawn import ask, by_url, draw
from tests.official_client import connect

PARAMETERS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "number": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["colour", "number"],
    "additionalProperties": False,
    # Otherwise the demo model would write as much white space as the grammar allows.
    "x-guidance": {"whitespace_flexible": False},
}
TOOL = {"type": "function", "function": {"name": "find", "description": "Finds it.", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "find"}}
PICTURE = by_url(draw(7).picture)


@pytest.fixture(scope="module")
def client(server_port: int) -> Iterator[openai.OpenAI]:
    with connect(server_port) as client:
        yield client


def complete(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return official_client.complete(client, messages, **{"tools": [TOOL], "max_tokens": 200} | options)


def assert_valid_call(call: Any) -> None:
    assert call.function.name == "find"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"colour", "number"}
    assert arguments["colour"] in ("red", "blue")
    assert arguments["number"] in range(1, 10)


@pytest.mark.parametrize(("choice", "end"), [("required", "tool_calls"), (NAMED, "stop")])
def test_a_required_call_is_valid(client: openai.OpenAI, choice: Any, end: str) -> None:
    [answered] = complete(client, ask(PICTURE, "What is it?"), tool_choice=choice, parallel_tool_calls=False).choices
    assert (answered.finish_reason, answered.message.content) == (end, None)
    [call] = answered.message.tool_calls
    assert_valid_call(call)


def test_a_streamed_call_equals_the_whole_one(client: openai.OpenAI) -> None:
    options: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    [whole] = complete(client, ask(PICTURE, "What is it?"), **options).choices
    terms: Any = {"model": "keepsight-demo", "temperature": 0, "tools": [TOOL], "max_tokens": 200}
    messages: Any = ask(PICTURE, "What is it?")
    with client.chat.completions.stream(messages=messages, **terms, **options) as events:
        kinds = [event.type for event in events]
        [streamed] = events.get_final_completion().choices
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert (streamed.finish_reason, streamed.message.content or None) == ("tool_calls", None)
    [call], [same] = whole.message.tool_calls, streamed.message.tool_calls or []
    assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)


def test_a_text_answer_with_tools_is_the_same_as_without_a_grammar(client: openai.OpenAI) -> None:
    create: Any = client.completions.create
    guided = complete(client, ask("What colours are there?"), extra_body={"return_token_ids": True})
    plain = create(model="keepsight-demo", prompt=guided.prompt_token_ids, temperature=0, max_tokens=200)
    assert plain.choices[0].text == guided.choices[0].message.content != ""
    assert guided.choices[0].finish_reason == plain.choices[0].finish_reason == "stop"


def test_a_second_turn_finds_the_call_in_the_cache_and_sees_the_result(client: openai.OpenAI) -> None:
    first = ask(PICTURE, "Find it.")
    called = complete(client, first, tool_choice="required", parallel_tool_calls=False)
    [call] = called.choices[0].message.tool_calls
    shown = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": [{"type": "text", "text": "It is:"}, by_url(draw(8).picture)],
    }
    answer = called.choices[0].message.model_dump(exclude_none=True)
    again = complete(client, [*first, answer, shown])
    assert again.choices[0].message.content
    found, known = again.usage.prompt_tokens_details, called.usage
    assert found.image_tokens == 2 * known.prompt_tokens_details.image_tokens
    # All full blocks of the prompt and the call (without its last token, the end of the turn) are found.
    assert found.cached_tokens >= (known.prompt_tokens + known.completion_tokens - 2) // 16 * 16 > known.prompt_tokens


def test_a_parsed_or_accumulated_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    first: Any = ask(PICTURE, "Find it.")
    terms: Any = {"model": "keepsight-demo", "temperature": 0, "max_tokens": 200, "messages": first}
    function: Any = TOOL["function"]
    strict = {"type": "function", "function": {**function, "strict": True}}
    terms |= {"tools": [strict], "tool_choice": "required", "parallel_tool_calls": False}
    parsed: Any = client.chat.completions.parse(**terms)
    with client.chat.completions.stream(**terms) as events:
        gathered: Any = events.get_final_completion()
    for answer in (parsed, gathered):
        message = answer.choices[0].message
        [call] = message.tool_calls
        assert call.function.parsed_arguments == json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "It is there."}
        assert complete(client, [*first, message, result]).choices[0].message.content


def test_a_json_response_format_may_be_combined_with_tools(client: openai.OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"count": {"enum": [1, 2]}}, "required": ["count"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    [answered] = complete(client, ask(PICTURE, "How many?"), response_format=form).choices
    if answered.message.tool_calls:
        assert_valid_call(answered.message.tool_calls[0])
    else:
        assert json.loads(answered.message.content)["count"] in (1, 2)


def test_errors_in_tools_name_their_field(client: openai.OpenAI) -> None:
    for options, field in (
        ({"tool_choice": {"type": "function", "function": {"name": "touch"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, ask("Hello"), **options)
        assert refused.value.param == field
