"""Tool calls in OpenAI's shapes, with a fake engine."""

import copy
import json
from typing import Any

import pytest

from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.call_text import PARAMETERS, TAGGED, write_call
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from tests.frontend.api.app_client import Client, FakeEngine, error_of
from tests.qwen_template import CODER_LIKE, QWEN_LIKE

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "go")]
LOOK, GO = '{"at": "the sea"}', '{"to": {"a": [1, 2]}}'
CALLS = f"{write_call('look', LOOK)}\n{write_call('go', GO)}"
TAGGED_CALLS = f"{write_call('look', LOOK, TAGGED)}\n{write_call('go', GO, TAGGED)}"
NAMED = {"type": "function", "function": {"name": "look"}}


def chat(client: Client, text: str, **fields: Any) -> dict[str, Any]:
    client.engine.text = text
    response = client.chat(tools=TOOLS, **fields)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def join(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, list[tuple[str, str]], str | None]:
    """Return the text, the calls and the finish reason of one choice of a stream."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    text, calls = "", list[list[str]]()
    for delta in (choice["delta"] for choice in own):
        text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call.keys() == {"index", "id", "type", "function"}
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                calls.append([call["function"]["name"], ""])
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
            assert call["index"] == len(calls) - 1
            calls[-1][1] += call["function"]["arguments"]
    [end] = [choice["finish_reason"] for choice in own if choice["finish_reason"]]
    assert own[-1]["finish_reason"] == end
    return text, [(name, arguments) for name, arguments in calls], end


def test_calls_have_the_shape_of_openai_s(client: Client) -> None:
    choice = chat(client, CALLS)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    calls = choice["message"]["tool_calls"]
    assert [call.keys() for call in calls] == [{"id", "type", "function"}] * 2
    assert [call["function"] for call in calls] == [
        {"name": "look", "arguments": LOOK},
        {"name": "go", "arguments": GO},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)


@pytest.mark.parametrize("text", ["I see.", ' {"name": "Anna"}', '{"name": "look"', "{"])
def test_a_text_is_returned_as_usual(client: Client, text: str) -> None:
    choice = chat(client, text)
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert join(client.stream(tools=TOOLS)) == (text, [], "stop")
    assert client.chat().json()["choices"][0]["message"] == choice["message"]


def test_a_text_that_looks_like_a_call_is_one_only_if_there_are_tools(client: Client) -> None:
    client.engine.text = CALLS
    asked: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
    for fields in asked:
        assert client.chat(**fields).json()["choices"][0]["message"]["content"] == CALLS
        assert join(client.stream(**fields)) == (CALLS, [], "stop")


def test_a_joined_stream_equals_a_whole_answer(client: Client) -> None:
    whole = chat(client, f"```json\n{CALLS}\n```")
    calls = [tuple(call["function"].values()) for call in whole["message"]["tool_calls"]]
    assert join(client.stream(tools=TOOLS)) == ("", calls, "tool_calls")


def test_arguments_come_in_pieces(client: Client) -> None:
    client.engine.text = CALLS
    deltas = [choice["delta"] for chunk in client.stream(tools=TOOLS) for choice in chunk["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert len([delta for delta in deltas if "tool_calls" in delta]) > 6
    assert all(len(delta.get("tool_calls", [0])) == 1 for delta in deltas)


@pytest.mark.parametrize(
    ("choice", "end", "expected"),
    [
        ("required", "stop", "tool_calls"),
        (NAMED, "stop", "stop"),
        ("required", "length", "length"),
        (NAMED, "length", "length"),
    ],
)
def test_calls_end_with_their_finish_reason(client: Client, choice: Any, end: Any, expected: str) -> None:
    client.engine.end = end
    assert chat(client, write_call("look", LOOK), tool_choice=choice)["finish_reason"] == expected
    assert join(client.stream(tools=TOOLS, tool_choice=choice))[2] == expected


def test_a_call_that_is_cut_off_is_returned_as_far_as_it_goes(client: Client) -> None:
    client.engine.end = "length"
    choice = chat(client, CALLS[:45])
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": "the se'}
    client.engine.end = "stop"
    stopped = chat(client, CALLS, stop="sea")
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "sea")
    assert stopped["message"]["tool_calls"][0]["function"]["arguments"] == '{"at": "the '


def test_a_call_that_is_cut_off_may_be_sent_back(client: Client) -> None:
    client.engine.end = "length"
    called = chat(client, CALLS[:45])["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "That was no JSON."}
    messages = [{"role": "user", "content": "Hello"}, called, result]
    assert client.chat(messages=messages, tools=TOOLS).status_code == 200
    prompt = client.preparer.tokenizer.decode(client.engine.requests[-1].token_ids, skip_special_tokens=False)
    assert f"<start_of_turn>model\n{CALLS[:45]}}}<end_of_turn>" in prompt


def test_each_choice_has_its_own_calls(client: Client) -> None:
    client.engine.text = CALLS
    chunks = client.stream(tools=TOOLS, n=2)
    assert join(chunks, 0) == join(chunks, 1) == ("", [("look", LOOK), ("go", GO)], "tool_calls")


def test_tokens_log_probabilities_and_usage_are_returned_once_each(client: Client) -> None:
    asked: dict[str, Any] = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    client.engine.text = CALLS
    *chunks, last = client.stream(tools=TOOLS, **asked)
    own = [choice for chunk in chunks for choice in chunk["choices"]]
    token_ids = [token_id for choice in own for token_id in choice.get("token_ids", ())]
    assert token_ids == [*client.preparer.tokenizer.encode(CALLS), 6]
    logprobs = [one for choice in own for one in (choice["logprobs"] or {"content": ()})["content"]]
    assert len(logprobs) == len(token_ids) == last["usage"]["completion_tokens"]
    whole = client.chat(tools=TOOLS, logprobs=True, return_token_ids=True).json()
    assert whole["choices"][0]["token_ids"] == token_ids
    assert whole["choices"][0]["logprobs"]["content"] == logprobs


def test_the_prompt_is_the_one_that_tokenize_shows(client: Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    shown = client.send("POST", "/tokenize", json={"messages": messages, "tools": TOOLS}).json()
    for choice in ("auto", "required", NAMED):
        client.chat(messages=messages, tools=TOOLS, tool_choice=choice)
        assert list(client.engine.requests[-1].token_ids) == shown["tokens"]
    assert len(client.send("POST", "/tokenize", json={"messages": messages}).json()["tokens"]) < shown["count"]
    twice = client.send("POST", "/tokenize", json={"messages": messages, "tools": TOOLS * 2})
    assert error_of(twice) == (400, "tools[2].function.name", "invalid_argument")


def test_calls_and_their_results_may_be_sent_back(client: Client) -> None:
    called = chat(client, CALLS)["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "wet"} for call in called["tool_calls"]]
    messages = [{"role": "user", "content": "Hello"}, called, *results]
    assert client.chat(messages=messages, tools=TOOLS).status_code == 200
    prompt = client.preparer.tokenizer.decode(client.engine.requests[-1].token_ids, skip_special_tokens=False)
    assert f"<start_of_turn>model\n{CALLS}<end_of_turn>" in prompt
    assert "user\nResult of look:\nwet\n\nResult of go:\nwet<end_of_turn>" in prompt
    results[0]["tool_call_id"] = "call_nobody"
    refused = client.chat(messages=messages, tools=TOOLS)
    assert error_of(refused) == (400, "messages[2].tool_call_id", "invalid_argument")


def test_a_schema_that_cannot_be_kept_is_refused_by_its_tool(client: Client) -> None:
    function = {"name": "touch", "strict": True, "parameters": {"type": "object", "not": {}}}
    refused = client.chat(tools=[*TOOLS, {"type": "function", "function": function}])
    assert error_of(refused) == (400, "tools[2].function.parameters", "invalid_argument")
    assert "not" in json.dumps(refused.json())


def test_engines_are_given_the_grammar(client: Client, engine: FakeEngine) -> None:
    client.chat(tools=TOOLS)
    guide = engine.requests[-1].sampling_params.structured_outputs
    assert guide is not None
    assert str(guide.grammar).startswith("start: TEXT | call+")


# A template with tagged calls --------------------------------------------------------------------------------------


@pytest.fixture
def tagged(preparer: RequestPreparer) -> Client:
    own = copy.copy(preparer)
    own.template = ChatTemplate(QWEN_LIKE, {})
    return Client(own, FakeEngine(own))


def prompt_of(client: Client) -> str:
    return client.preparer.tokenizer.decode(client.engine.requests[-1].token_ids, skip_special_tokens=False)


def test_engines_are_given_the_grammar_of_the_template_s_form(tagged: Client) -> None:
    for choice, opening in (("auto", "start: TEXT | first call*"), (NAMED, 'start: call "\\n"?')):
        tagged.chat(tools=TOOLS, tool_choice=choice)
        guide = tagged.engine.requests[-1].sampling_params.structured_outputs
        assert guide is not None
        assert str(guide.grammar).startswith(opening)
        assert "</tool_call>" in str(guide.grammar).replace("\\/", "/")


@pytest.mark.parametrize("text", ["", "I look.", "I look.\n<b>"])
def test_a_text_and_the_calls_after_it_are_both_returned(tagged: Client, text: str) -> None:
    choice = chat(tagged, f"{text}\n{TAGGED_CALLS}" if text else TAGGED_CALLS)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", text or None)
    calls = [tuple(call["function"].values()) for call in choice["message"]["tool_calls"]]
    assert calls == [("look", LOOK), ("go", GO)]
    assert join(tagged.stream(tools=TOOLS)) == (text, calls, "tool_calls")


@pytest.mark.parametrize("text", ["I see.", "<tool_call>", CALLS, '<tool_call>\n{"name": "Anna", "arguments": {}}'])
def test_a_text_without_tagged_calls_is_returned_as_usual(tagged: Client, text: str) -> None:
    choice = chat(tagged, text)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    assert "tool_calls" not in choice["message"]
    assert join(tagged.stream(tools=TOOLS)) == (text, [], "stop")


@pytest.mark.parametrize("begun", ["", "I look.", "I look.\n"])
def test_the_next_turn_s_prompt_continues_the_answer(tagged: Client, begun: str) -> None:
    text = f"{begun}\n{TAGGED_CALLS}" if begun else TAGGED_CALLS
    called = chat(tagged, text)["message"]
    answered = prompt_of(tagged) + text
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "wet"} for call in called["tool_calls"]]
    chat(tagged, "Wet.", messages=[{"role": "user", "content": "Hello"}, called, *results])
    assert prompt_of(tagged).startswith(f"{answered}<|im_end|>")


def test_a_tagged_call_that_is_cut_off_may_be_sent_back(tagged: Client) -> None:
    tagged.engine.end = "length"
    cut = TAGGED_CALLS.partition("sea")[0]
    choice = chat(tagged, f"I look.\n{cut}")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "I look.")
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "That was no JSON."}
    chat(tagged, "Again.", messages=[{"role": "user", "content": "Hello"}, choice["message"], result])
    assert f"assistant\nI look.\n{cut}}}\n</tool_call><|im_end|>" in prompt_of(tagged)


# A template with parameters ------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "times": {"type": "integer"},
        "sure": {"type": "boolean"},
        "by": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "all": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["at"],
}
WITH_PARAMETERS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "go")]
AT, FULL = '{"at": "3"}', '{"at": "the \\"sea\\",\\nthen", "times": 3, "sure": true, "by": null, "all": [1,  2.50]}'
PARAMETER_CALLS = f"{write_call('look', FULL, PARAMETERS)}\n{write_call('go', AT, PARAMETERS)}"


@pytest.fixture
def coder(preparer: RequestPreparer) -> Client:
    own = copy.copy(preparer)
    own.template = ChatTemplate(CODER_LIKE, {})
    return Client(own, FakeEngine(own))


@pytest.mark.parametrize("text", ["", "I look.", "I look.\n<b>"])
def test_parameters_are_returned_as_json_whole_and_streamed(coder: Client, text: str) -> None:
    coder.engine.text = f"{text}\n\n{PARAMETER_CALLS}" if text else PARAMETER_CALLS
    choice = coder.chat(tools=WITH_PARAMETERS).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", text or None)
    calls = [tuple(call["function"].values()) for call in choice["message"]["tool_calls"]]
    assert calls == [("look", FULL), ("go", AT)]
    assert join(coder.stream(tools=WITH_PARAMETERS)) == (text, calls, "tool_calls")


@pytest.mark.parametrize(
    ("asked", "opening"),
    [
        ({}, "start: TEXT | first call* TAIL?"),
        ({"parallel_tool_calls": False}, "start: TEXT | first TAIL?"),
        ({"tool_choice": "required"}, 'start: call ("\\n" call)* "\\n"?'),
        ({"tool_choice": NAMED}, 'start: call "\\n"?'),
    ],
)
def test_engines_are_given_the_grammar_of_parameters(coder: Client, asked: dict[str, Any], opening: str) -> None:
    coder.chat(tools=WITH_PARAMETERS, **asked)
    guide = coder.engine.requests[-1].sampling_params.structured_outputs
    assert guide is not None
    assert str(guide.grammar).startswith(f"{opening}\n")
    assert '"<parameter=times>"' in str(guide.grammar)


def test_without_a_choice_of_tools_a_call_with_parameters_is_text(coder: Client) -> None:
    coder.engine.text = PARAMETER_CALLS
    asked = {"tools": WITH_PARAMETERS, "tool_choice": "none"}
    assert coder.chat(**asked).json()["choices"][0]["message"]["content"] == PARAMETER_CALLS
    assert join(coder.stream(**asked)) == (PARAMETER_CALLS, [], "stop")


@pytest.mark.parametrize("begun", ["", "I look.\n\n"])
def test_the_next_turn_s_prompt_continues_an_answer_with_parameters(coder: Client, begun: str) -> None:
    """Although the template itself would write `True`, `None` and `[1, 2.5]`."""
    coder.engine.text = begun + PARAMETER_CALLS
    called = coder.chat(tools=WITH_PARAMETERS).json()["choices"][0]["message"]
    answered = prompt_of(coder) + coder.engine.text
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "wet"} for call in called["tool_calls"]]
    coder.chat(tools=WITH_PARAMETERS, messages=[{"role": "user", "content": "Hello"}, called, *results])
    assert prompt_of(coder).startswith(f"{answered}<|im_end|>")


@pytest.mark.parametrize(
    ("behind", "arguments"),
    [
        ("<parameter=", ""),
        ("<parameter=at>\nthe s", '{"at": "the s'),
        ("<parameter=at>\nthe sea\n</para", '{"at": "the sea'),
        ("<parameter=at>\nsea\n</parameter>\n<parameter=times>\n12", '{"at": "sea", "times": 12'),
        ("<parameter=at>\nsea\n</parameter>\n", '{"at": "sea"'),
    ],
)
def test_parameters_that_are_cut_off_are_returned_and_may_be_sent_back(
    coder: Client, behind: str, arguments: str
) -> None:
    coder.engine.text, coder.engine.end = f"<tool_call>\n<function=look>\n{behind}", "length"
    choice = coder.chat(tools=WITH_PARAMETERS).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": arguments}
    assert join(coder.stream(tools=WITH_PARAMETERS)) == ("", [("look", arguments)], "length")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "That was no JSON."}
    coder.chat(tools=WITH_PARAMETERS, messages=[{"role": "user", "content": "Hello"}, choice["message"], result])
    assert "assistant\n<tool_call>\n<function=look>\n</function>\n</tool_call><|im_end|>" in prompt_of(coder)
