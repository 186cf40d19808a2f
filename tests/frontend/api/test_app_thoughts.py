"""A model's thought is separated from its answer, with a fake engine."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepsight.config import Config
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.call_text import PARAMETERS, TAGGED, write_call
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.requests import ThoughtTokens
from tests.frontend.api.app_client import Client, FakeEngine, complete, error_of
from tests.frontend.api.test_app_messages import gather
from tests.frontend.api.test_app_responses import ask, kinds, stream, without_ids
from tests.frontend.qwen_like import build_thinking_checkpoint
from tests.qwen_template import QWEN3_5_LIKE, QWEN_LIKE, THINKING_QWEN_LIKE

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = write_call("look", '{"at": "the sea"}', TAGGED)
ANSWERED = "Let me see.\n\nIt is red.\n</think>\n\nRed."


@pytest.fixture(scope="module", params=[THINKING_QWEN_LIKE, QWEN_LIKE], ids=["thinking", "hybrid"])
def preparer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RequestPreparer]:
    directory: Path = tmp_path_factory.mktemp("thinking")
    build_thinking_checkpoint(directory, request.param)
    preparer = RequestPreparer.from_config(Config(model=directory))
    yield preparer
    preparer.close()


def opens(client: Client) -> bool:
    """Return whether the prompt itself ends with the opening tag."""
    assert client.preparer.template.source is not None
    return client.preparer.template.source == THINKING_QWEN_LIKE


def say(client: Client, text: str) -> None:
    """Make the engine say `text` after the opening tag, whether the prompt or the model writes that tag."""
    client.engine.text = text if opens(client) else f"<think>\n{text}"


def join(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    joined = {name: "".join(each.get(name, "") for each in deltas) for name in ("reasoning_content", "content")}
    assert all(each.get("reasoning") == each.get("reasoning_content") for each in deltas)
    assert not any("reasoning" in each and "content" in each for each in deltas)
    return joined


def test_a_thought_has_a_field_of_its_own_by_both_names_whole_and_streamed(client: Client) -> None:
    say(client, ANSWERED)
    body = client.chat().json()
    message = body["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Red.",
        "refusal": None,
        "reasoning": "Let me see.\n\nIt is red.",
        "reasoning_content": "Let me see.\n\nIt is red.",
    }
    *chunks, last = client.stream(stream_options={"include_usage": True})
    assert join(chunks) == {"reasoning_content": message["reasoning_content"], "content": "Red."}
    num_of_answer = len(client.preparer.tokenizer.encode("\n\nRed.")) + 1
    for usage in (body["usage"], last["usage"]):
        num_thought = usage["completion_tokens_details"]["reasoning_tokens"]
        assert usage["completion_tokens"] == num_thought + num_of_answer


def test_a_thought_that_is_cut_off_has_no_answer(client: Client) -> None:
    say(client, "Let me see")
    client.engine.end = "length"
    choice = client.chat().json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Let me see", None)
    assert join(client.stream()) == {"reasoning_content": "Let me see", "content": ""}


def test_a_tag_spelled_in_other_tokens_does_not_end_a_thought(client: Client) -> None:
    """The engine does the same: it applies a grammar only after the token of the closing tag."""
    encode = client.preparer.tokenizer.encode
    opened = () if opens(client) else encode("<think>")
    client.engine.token_ids = [*opened, *encode("Is </thi"), *encode("nk> a tag?"), *encode("</think>Red.")]
    message = client.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Is </think> a tag?", "Red.")


def test_without_a_thought_the_field_is_null(client: Client) -> None:
    client.engine.text = "\n</think>\n\nRed." if opens(client) else "Red."
    message = client.chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (None, None, "Red.")


def test_a_call_counts_after_a_thought_but_not_within_it(client: Client) -> None:
    say(client, f"I might {CALL}\n</think>\n\n{CALL}")
    choice = client.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (f"I might {CALL}", None)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"at": "the sea"}']
    say(client, f"I might {CALL}\n</think>\n\nNo.")
    message = client.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert (message["content"], "tool_calls" in message) == ("No.", False)


def test_a_call_with_parameters_after_a_thought_is_found_in_the_next_turn(client: Client) -> None:
    if not opens(client):
        return  # one template of this form is enough
    own = copy.copy(client.preparer)
    own.template = ChatTemplate(QWEN3_5_LIKE, {})
    client = Client(own, FakeEngine(own))
    call = write_call("look", '{"at": "the sea", "times": 3}', PARAMETERS)
    client.engine.text = f"I might {call}\n</think>\n\n{call}"
    message = client.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (f"I might {call}", None)
    [called] = message["tool_calls"]
    assert called["function"]["arguments"] == '{"at": "the sea", "times": 3}'
    result = {"role": "tool", "tool_call_id": called["id"], "content": "wet"}
    client.chat(tools=TOOLS, messages=[{"role": "user", "content": "Hello"}, message, result])
    prompts = [own.tokenizer.decode(each.token_ids, skip_special_tokens=False) for each in client.engine.requests]
    assert prompts[1].startswith(f"{prompts[0]}{client.engine.text}<|im_end|>")


@pytest.mark.parametrize("asked", [{"guided_regex": "[ab]+"}, {"tools": TOOLS, "tool_choice": "required"}, {}])
def test_the_engine_is_told_where_a_grammar_begins(client: Client, asked: dict[str, Any]) -> None:
    client.chat(**asked)
    opening, closing = client.preparer.tokenizer.encode("<think></think>")
    thought = client.engine.requests[-1].thought
    assert thought == ThoughtTokens(None if opens(client) else opening, closing)


def test_an_unrequested_thought_is_not_in_the_answer(client: Client) -> None:
    say(client, ANSWERED)
    asked: dict[str, Any] = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    body = client.chat(**asked).json()
    choice = body["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (None, "Red.")
    sent = json.dumps([choice, client.stream(**asked)])
    assert "see" not in sent
    assert choice["token_ids"] == [*client.preparer.tokenizer.encode("\n\nRed."), 6]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5


def test_an_unrequested_thought_in_one_piece_with_its_answer_is_removed_too(client: Client) -> None:
    say(client, "Hm.</think>Red.")
    # Text that may begin the stop string is held back, so all of it comes in one piece.
    asked: dict[str, Any] = {"include_reasoning": False, "stop": f"{client.engine.text}!"}
    message = client.chat(**asked).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (None, "Red.")
    assert join(client.stream(**asked)) == {"reasoning_content": "", "content": "Red."}


def test_each_choice_has_its_own_thought(client: Client) -> None:
    say(client, ANSWERED)
    body = client.chat(n=2).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["Red."] * 2
    one = client.chat().json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * one


def test_a_completion_includes_the_thought(client: Client) -> None:
    say(client, ANSWERED)
    body = complete(client, "Hello").json()
    assert body["choices"][0]["text"] == client.engine.text
    assert "completion_tokens_details" not in body["usage"]
    assert client.engine.requests[-1].thought is None


@pytest.mark.parametrize("asked", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_a_model_told_not_to_think_answers_without_a_thought(client: Client, asked: dict[str, Any]) -> None:
    if opens(client):
        return  # this model always thinks
    client.engine.text = "<think>Red."
    body = client.chat(**asked).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "<think>Red.", "refusal": None}
    assert "completion_tokens_details" not in body["usage"]
    assert client.engine.requests[-1].thought is None


def test_an_effort_of_reasoning_is_taken_by_models_that_think(client: Client) -> None:
    say(client, ANSWERED)
    for effort in ("low", "medium", "high"):
        assert client.chat(reasoning_effort=effort).json()["choices"][0]["message"]["reasoning"]
        assert [item["type"] for item in ask(client, reasoning={"effort": effort})["output"]] == [
            "reasoning",
            "message",
        ]


def test_an_effort_that_a_model_does_not_have_is_refused_by_its_name_in_each_api(client: Client) -> None:
    if not opens(client):
        return
    assert error_of(client.chat(reasoning_effort="none")) == (400, "reasoning_effort", "unsupported_field")
    body = {"input": "Hello", "reasoning": {"effort": "none"}}
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        refused = client.send("POST", path, json=body)
        assert error_of(refused) == (400, "reasoning.effort", "unsupported_field")


def test_a_word_that_is_no_effort_is_refused_with_those_that_are(client: Client) -> None:
    refused = client.chat(reasoning_effort="some")
    assert error_of(refused) == (400, "reasoning_effort", "invalid_argument")
    assert "'minimal' or 'low'" in refused.json()["error"]["message"]


def test_a_response_has_a_thought_as_an_item_before_its_message(client: Client) -> None:
    say(client, ANSWERED)
    body = ask(client)
    thought, message = (without_ids(item) for item in body["output"])
    part = {"type": "reasoning_text", "text": "Let me see.\n\nIt is red."}
    assert thought == {"type": "reasoning", "status": "completed", "summary": [], "content": [part]}
    assert [part["text"] for part in message["content"]] == ["Red."]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 5


def test_a_stream_has_the_thought_before_the_message(client: Client) -> None:
    say(client, ANSWERED)
    events = stream(client, include=["message.output_text.logprobs"])
    event_kinds = [kind for kind in kinds(events) if not kind.endswith("text.delta")]
    item = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    items = [kind.format(text) for text in ("reasoning_text", "output_text") for kind in item]
    assert event_kinds == ["created", "in_progress", *items, "completed"]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    thought, message = events[-1]["response"]["output"]
    assert "".join(deltas) == thought["content"][0]["text"]
    *logprobs, _end = message["content"][0]["logprobs"]
    assert "".join(each["token"] for each in logprobs) == "\n\nRed."


def test_a_response_cut_off_within_a_thought_has_only_the_thought(client: Client) -> None:
    say(client, "Let me see")
    client.engine.end = "length"
    body = ask(client)
    [thought] = body["output"]
    assert (body["status"], thought["type"], thought["status"]) == ("incomplete", "reasoning", "incomplete")
    assert [event["type"] for event in stream(client)][-1] == "response.incomplete"
    assert [item["type"] for item in ask(client, include_reasoning=False)["output"]] == ["message"]


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}])
def test_an_empty_answer_may_be_sent_back(client: Client, fields: dict[str, Any]) -> None:
    say(client, "\n")
    client.engine.end = "length"
    message = client.chat(**fields).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, None)
    assert client.chat(messages=[{"role": "user", "content": "Hello"}, message] * 2).status_code == 200


def test_a_message_has_a_thought_as_a_block_and_can_be_sent_back_with_it(client: Client) -> None:
    say(client, f"Hm.\n</think>\n\n{CALL}")
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    message = gather(client, tools=tools)
    thought, called = (block.to_dict() for block in message.content)
    assert thought == {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}
    assert message.usage.output_tokens_details is not None
    untold = gather(client, tools=tools, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in untold.content] == ["tool_use"]
    result = {"type": "tool_result", "tool_use_id": called["id"], "content": "the sea"}
    hidden = {"type": "redacted_thinking", "data": "?"}
    turns = [{"role": "assistant", "content": [thought, hidden, called]}, {"role": "user", "content": [result]}]
    gather(client, tools=tools, messages=[{"role": "user", "content": "Hello"}, *turns])
    answered = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "the sea"}'}}
    expected = [answered | {"tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "the sea"}]
    client.chat(messages=[{"role": "user", "content": "Hello"}, *expected], tools=TOOLS)
    *_, of_message, of_chat = (request.token_ids for request in client.engine.requests)
    assert of_message == of_chat


def test_a_message_of_a_model_that_is_told_not_to_think_has_none(client: Client) -> None:
    gather(client, thinking={"type": "disabled"})
    client.chat(reasoning_effort=None if opens(client) else "none")
    of_message, of_chat = client.engine.requests
    assert (of_message.token_ids, of_message.thought) == (of_chat.token_ids, of_chat.thought)


def test_a_thought_may_be_sent_back_with_the_answer(client: Client) -> None:
    say(client, f"Hm.\n</think>\n\n{CALL}")
    called = client.chat(tools=TOOLS).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "the sea"}
    asked = {"role": "user", "content": "Hello"}
    assert client.chat(tools=TOOLS, messages=[asked, called, result]).status_code == 200
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    output = ask(client, tools=[tool], input="Hello")["output"]
    call_result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "the sea"}
    ask(client, tools=[tool], input=[asked, *output, call_result])
    first, of_chat, of_response, again = (request.token_ids for request in client.engine.requests)
    assert of_response == first
    assert again == of_chat
    prompt = client.preparer.tokenizer.decode(again, skip_special_tokens=False)
    assert ("<think>\nHm.\n</think>\n\n<tool_call>" in prompt) == opens(client)
