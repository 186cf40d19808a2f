"""The Responses API, with a fake engine; OpenAI's own types are the judge of its shapes."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseFunctionToolCallParam,
    ResponseItemList,
    ResponseStreamEvent,
)
from openai.types.responses.response_input_param import FunctionCallOutput
from pydantic import TypeAdapter

from keepsight.api_settings import ApiSettings
from keepsight.errors import EngineLostError, InvalidArgumentError
from keepsight.frontend.api.kept_responses import KeptResponses
from keepsight.frontend.api.responses_fields import FunctionTool, TextFormat, TextOptions
from keepsight.frontend.api.responses_request import ResponsesRequest
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.call_text import PARAMETERS, TAGGED, write_call
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.requests import EngineRequest
from tests.drawn import draw
from tests.frontend.api.app_client import MODEL, Client, FakeEngine, error_of
from tests.qwen_template import CODER_LIKE, QWEN_LIKE

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
GO = LOOK | {"name": "go", "description": "Somewhere."}
ARGUMENTS = '{"at": "the sea"}'
CALLS = f"{write_call('look', ARGUMENTS)}\n{write_call('go', '{}')}"
LOGPROBS = ["message.output_text.logprobs"]
_event: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def post(client: Client, **fields: Any) -> httpx.Response:
    return client.send("POST", "/v1/responses", json={"model": MODEL, "input": "Hello"} | fields)


def ask(client: Client, **fields: Any) -> dict[str, Any]:
    response = post(client, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Response.model_validate(as_billed(body))
    return body


def as_billed(response: dict[str, Any]) -> dict[str, Any]:
    """Return the response with a field that OpenAI's types require for billing and this server does not send."""
    if (usage := response["usage"]) is None:
        return response
    details = usage["input_tokens_details"] | {"cache_write_tokens": 0}
    return response | {"usage": usage | {"input_tokens_details": details}}


def stream(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking their order and that each has OpenAI's shape."""
    response = post(client, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *written, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for number, each in enumerate(written):
        name, data = each.split("\n")
        event = json.loads(data.removeprefix("data: "))
        _event.validate_python(event | ({"response": as_billed(event["response"])} if "response" in event else {}))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def asked(client: Client) -> EngineRequest:
    return client.engine.requests[-1]


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_an_answer_is_one_message(client: Client) -> None:
    body = ask(client)
    [item] = body["output"]
    assert item["id"].startswith("msg_")
    assert without_ids(item) == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Red. Blue.", "annotations": [], "logprobs": []}],
    }
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert body["completed_at"] - body["created_at"] == pytest.approx(0, abs=60)  # clocks may be set back meanwhile
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {
        "cached_tokens": 0,
        "cache_write_tokens": 0,
        "image_tokens": 0,
        "audio_tokens": 0,
        "text_tokens": usage["input_tokens"],
    }


def test_a_response_request_is_prepared_like_a_chat(client: Client) -> None:
    client.chat(messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}])
    ask(client, instructions="Be short.")
    of_chat, of_responses = client.engine.requests
    assert of_chat.token_ids == of_responses.token_ids


def test_a_response_repeats_the_request_s_fields(client: Client) -> None:
    form = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
    body = ask(
        client,
        instructions="Be short.",
        max_output_tokens=7,
        metadata={"of": "mine"},
        parallel_tool_calls=False,
        prompt_cache_key="mine",
        temperature=0.5,
        top_p=0.25,
        text={"format": form},
        tools=[GO],
        tool_choice={"type": "function", "name": "go"},
    )
    expected = {
        "instructions": "Be short.",
        "max_output_tokens": 7,
        "metadata": {"of": "mine"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "mine",
        "temperature": 0.5,
        "top_p": 0.25,
        "text": {"format": form},
        "tools": [GO],
        "tool_choice": {"type": "function", "name": "go"},
    }
    assert expected.items() <= body.items()
    assert asked(client).sampling_params.max_tokens == 7


def test_a_stream_has_the_content_of_the_whole_answer(client: Client) -> None:
    events = stream(client)
    event_kinds = kinds(events)
    assert event_kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert event_kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(event_kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == events[-4]["text"] == "Red. Blue."
    done = events[-1]["response"]
    assert done["output"] == [events[-2]["item"]]
    assert [without_ids(each) for each in done["output"]] == [without_ids(each) for each in ask(client)["output"]]
    assert events[0]["response"]["status"] == "in_progress"
    assert {event["response"]["id"] for event in events if "response" in event} == {done["id"]}
    assert len({event["item_id"] for event in events if "item_id" in event} | {done["output"][0]["id"]}) == 1
    assert done["usage"]["output_tokens"] > 0


def test_an_answer_that_is_cut_off_is_incomplete(client: Client) -> None:
    client.engine.end = "length"
    body = ask(client)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["output"][0]["status"], body["completed_at"]) == ("incomplete", None)
    assert kinds(stream(client))[-1] == "incomplete"


def test_an_empty_answer_is_still_a_message(client: Client) -> None:
    client.engine.token_ids = [6]
    [item] = ask(client)["output"]
    assert item["content"][0]["text"] == ""
    assert kinds(stream(client))[2:-1] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_calls_are_items_of_their_own(client: Client) -> None:
    client.engine.text = CALLS
    body = ask(client, tools=[LOOK, GO])
    assert [without_ids(item) for item in body["output"]] == [
        {"type": "function_call", "name": "look", "arguments": ARGUMENTS, "status": "completed"},
        {"type": "function_call", "name": "go", "arguments": "{}", "status": "completed"},
    ]
    ids = [item[name] for item in body["output"] for name in ("id", "call_id")]
    assert [each.partition("_")[0] for each in ids] == ["fc", "call", "fc", "call"]
    assert len(set(ids)) == 4


def test_text_before_calls_is_an_item_of_its_own_and_can_be_sent_back(
    preparer: RequestPreparer,
) -> None:
    tagged = copy.copy(preparer)
    tagged.template = ChatTemplate(QWEN_LIKE, {})
    client, call = Client(tagged, FakeEngine(tagged)), write_call("look", ARGUMENTS, TAGGED)
    client.engine.text = f"I look.\n{call}"
    events = stream(client, tools=[LOOK], include=LOGPROBS)
    message, called = output = events[-1]["response"]["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    assert (message["content"][0]["text"], message["status"]) == ("I look.", "completed")
    assert "".join(one["token"] for one in message["content"][0]["logprobs"]) == "I look."
    assert (called["name"], called["arguments"], called["status"]) == ("look", ARGUMENTS, "completed")
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "the sea"}
    ask(client, tools=[LOOK], input=[{"role": "user", "content": "Hello"}, *output, result])
    first, second = (tagged.tokenizer.decode(each.token_ids) for each in client.engine.requests)
    assert second.startswith(f"{first}I look.\n{call}<|im_end|>")


def test_parameters_are_arguments_of_an_item_and_can_be_sent_back(preparer: RequestPreparer) -> None:
    coder = copy.copy(preparer)
    coder.template = ChatTemplate(CODER_LIKE, {})
    client, arguments = Client(coder, FakeEngine(coder)), '{"at": "7", "times": 3, "sure": true}'
    tool = LOOK | {
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "additionalProperties": {}}
    }
    client.engine.text = f"I look.\n\n{write_call('look', arguments, PARAMETERS)}"
    events = stream(client, tools=[tool])
    message, called = output = events[-1]["response"]["output"]
    assert (message["content"][0]["text"], called["arguments"], called["status"]) == ("I look.", arguments, "completed")
    deltas = [each["delta"] for each in events if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == arguments
    assert len(deltas) > 3
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "the sea"}
    ask(client, tools=[tool], input=[{"role": "user", "content": "Hello"}, *output, result])
    first, second = (coder.tokenizer.decode(each.token_ids) for each in client.engine.requests)
    assert second.startswith(f"{first}{client.engine.text}<|im_end|>")
    client.engine.text, client.engine.end = client.engine.text.partition("3\n")[0], "length"
    *_, item = ask(client, tools=[tool])["output"]
    assert (item["arguments"], item["status"]) == ('{"at": "7", "times": ', "incomplete")


def test_a_stream_contains_each_call_with_its_arguments(client: Client) -> None:
    client.engine.text = CALLS
    events = stream(client, tools=[LOOK, GO])
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(each["output_index"], each["item"]["name"], each["item"]["arguments"]) for each in added] == [
        (0, "look", ""),
        (1, "go", ""),
    ]
    for index, item in enumerate(done):
        deltas = [each["delta"] for each in events if "delta" in each and each["output_index"] == index]
        assert "".join(deltas) == item["arguments"]
    assert events[-1]["response"]["output"] == done
    assert kinds(events)[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]


def test_a_call_that_is_cut_off_is_incomplete(client: Client) -> None:
    client.engine.text, client.engine.end = CALLS.partition("the")[0], "length"
    [item] = ask(client, tools=[LOOK])["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")


def test_an_answer_can_be_sent_back_as_it_came(client: Client) -> None:
    client.engine.text = write_call("look", ARGUMENTS)
    output = ask(client, tools=[LOOK])["output"]
    result = {"type": "function_call_output", "call_id": output[0]["call_id"], "output": "the sea"}
    client.engine.text = "It is the sea."
    answered = ask(client, tools=[LOOK], input=[{"role": "user", "content": "Hello"}, *output, result])["output"]
    again = {"role": "user", "content": "Really?"}
    ask(client, tools=[LOOK], input=[{"role": "user", "content": "Hello"}, *output, result, *answered, again])
    first, second, third = (client.preparer.tokenizer.decode(each.token_ids) for each in client.engine.requests)
    assert write_call("look", ARGUMENTS) in second
    assert "It is the sea." in third
    assert len(first) < len(second) < len(third)


def test_an_answer_can_be_sent_back_as_openais_client_holds_it(client: Client) -> None:
    client.engine.text = write_call("look", ARGUMENTS)
    [call] = ask(client, tools=[LOOK])["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "the sea"}
    client.engine.text = '{"a": 1}'
    [message] = ask(client)["output"]
    parsed = message | {"content": [message["content"][0] | {"parsed": {"a": 1}}]}
    held = [call | {"parsed_arguments": json.loads(ARGUMENTS), "async_": None}, result, parsed]
    user = {"role": "user", "content": "Hello"}
    ask(client, tools=[LOOK], input=[user, call, result, message, user])
    ask(client, tools=[LOOK], input=[user, *held, user])
    *_, plain, again = client.engine.requests
    assert again.token_ids == plain.token_ids


def test_fields_that_change_nothing_are_accepted(client: Client) -> None:
    nothing: dict[str, Any] = {
        "reasoning": {"effort": "none", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "chat_template_kwargs": {"enable_thinking": False},
        "truncation": "disabled",
        "background": False,
        "client_metadata": {"x-codex-installation-id": "a"},
    }
    assert ask(client, **nothing)["status"] == "completed"
    assert kinds(stream(client, stream_options={"include_usage": True}))[-1] == "completed"


def test_every_field_of_openais_tools_and_calls_may_ask_for_nothing(client: Client) -> None:
    direct = {"type": "direct"}
    tool: dict[str, Any] = {"type": "function", "name": "look", "parameters": {}, "strict": None, "description": None}
    tool |= {"allowed_callers": ["direct"], "async": False, "defer_loading": False, "output_schema": None}
    call: dict[str, Any] = {
        "type": "function_call",
        "id": "fc_1",
        "status": "completed",
        "call_id": "c1",
        "name": "look",
    }
    call |= {"arguments": "{}", "caller": direct, "async": False, "namespace": None}
    result: dict[str, Any] = {"type": "function_call_output", "id": None, "status": None, "call_id": "c1"}
    result |= {"output": "the sea", "caller": direct, "name": None, "namespace": None}
    for sent, kind in ((tool, FunctionToolParam), (call, ResponseFunctionToolCallParam), (result, FunctionCallOutput)):
        assert sent.keys() == kind.__annotations__.keys()
    user = {"role": "user", "content": "Hello"}
    body = ask(client, tools=[tool, GO | {"allowed_callers": None}], input=[user, call, result])
    assert body["tools"][0]["async"] is False


def test_log_probabilities_are_returned_if_included(client: Client) -> None:
    body = ask(client, include=LOGPROBS, top_logprobs=2)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == body["usage"]["output_tokens"]
    assert [len(each["top_logprobs"]) for each in logprobs] == [2] * len(logprobs)
    events = stream(client, include=LOGPROBS, top_logprobs=2)
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == logprobs
    streamed = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    assert streamed == logprobs
    assert ask(client)["output"][0]["content"][0]["logprobs"] == []


def test_the_account_is_returned_on_request(client: Client) -> None:
    assert ask(client, keepsight={"account": True})["keepsight"]["accounts"]
    assert stream(client, keepsight={"account": True})[-1]["response"]["keepsight"]["accounts"]
    assert "keepsight" not in ask(client)


def test_a_failure_before_the_first_token_has_a_status(client: Client) -> None:
    client.engine.fails_after, client.engine.failure = 0, EngineLostError("gone", had_begun=False)
    assert error_of(post(client, stream=True)) == (503, None, "engine_lost")


def test_a_failure_after_the_first_token_is_the_last_event(client: Client) -> None:
    client.engine.fails_after = 2
    events = stream(client)
    assert kinds(events)[-1] == "failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "broke" not in response["error"]["message"]
    client.engine.failure = EngineLostError("gone", had_begun=True)
    error = stream(client)[-1]["response"]["error"]
    assert (error["code"], error["message"].partition(":")[0]) == ("server_error", "engine_lost")


def test_the_input_is_counted_without_an_answer(client: Client) -> None:
    response = client.send("POST", "/v1/responses/input_tokens", json={"input": "Hello", "instructions": "Be short."})
    counted = response.json()
    assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
    assert counted["input_tokens"] == ask(client, instructions="Be short.")["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": []}, "input"),
        ({"input": "x" * 100_000}, "input"),
        ({"input": "<start_of_image>"}, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, "input"),
        ({"input": [{"role": "nobody", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
         "input[0].content[0].image_url"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"tools": [LOOK | {"async": True}]}, "tools[0].async"),
        ({"tools": [LOOK, GO | {"allowed_callers": ["programmatic"]}]}, "tools[1].allowed_callers"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"chat_template_kwargs": {"depth": 3}}, "chat_template_kwargs.depth"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}},
         "text.format.schema"),
        ({"text": {"format": {"type": "text"}}, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"include_usage": False}}, "stream_options.include_usage"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [LOOK | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [LOOK | {"parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "go"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "go"}]}}, "tool_choice.tools[0].name"),
        ({"metadata": {"a": "b" * 513}}, "metadata['a']"),
        ({"metadata": {"a": 3}}, "metadata['a']"),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata"),
        ({"prompt_cache_key": "x" * 2000}, "prompt_cache_key"),
        ({"mm_processor_kwargs": {"resample": 3}}, "mm_processor_kwargs.resample"),
        ({"background": True}, "background"),
        ({"tools": [LOOK | {"description": "x" * 2**20}], "tool_choice": "none"}, "tools"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_errors_use_the_field_names_of_this_api(client: Client, fields: dict[str, Any], field: str) -> None:
    response = post(client, **fields)
    assert response.status_code in (400, 404)
    assert error_of(response)[1] == field
    assert client.engine.requests == []


# Kept responses -----------------------------------------------------------------------------------------------


@pytest.fixture
def keeper(client: Client, tmp_path: Path) -> Iterator[Client]:
    client.kept = KeptResponses(tmp_path, 9_000)
    yield client
    client.kept.check_invariants()
    client.kept.close()


def get(client: Client, name: str, **options: Any) -> httpx.Response:
    return client.send("GET", f"/v1/responses/{name}", **options)


def test_a_response_to_a_body_with_a_byte_order_mark_is_kept(keeper: Client) -> None:
    content = b"\xef\xbb\xbf" + json.dumps({"model": MODEL, "input": "Hello"}).encode()
    answered = keeper.send("POST", "/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answered.status_code == 200
    assert get(keeper, answered.json()["id"]).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_continues_a_response_as_if_everything_were_sent_again(keeper: Client, streams: bool) -> None:
    items = [{"role": "user", "content": "Hello"}]
    first = stream(keeper, input=items)[-1]["response"] if streams else ask(keeper, input="Hello")
    second = ask(keeper, input="And?", previous_response_id=first["id"])
    ask(keeper, input="So?", previous_response_id=second["id"], instructions="Be short.")
    items += [*first["output"], {"role": "user", "content": "And?"}]
    ask(keeper, input=items, store=False)
    ask(keeper, input=[*items, *second["output"], {"role": "user", "content": "So?"}], instructions="Be short.")
    _, two, three, two_at_once, three_at_once = keeper.engine.requests
    assert (two.token_ids, three.token_ids) == (two_at_once.token_ids, three_at_once.token_ids)
    assert second["previous_response_id"] == first["id"]


def test_pictures_need_not_be_sent_again(keeper: Client) -> None:
    look = {"type": "input_image", "image_url": draw(7).data_url}
    first = ask(keeper, input=[{"role": "user", "content": [look, {"type": "input_text", "text": "What is it?"}]}])
    ask(keeper, input="Which colour?", previous_response_id=first["id"])
    before, after = keeper.engine.requests
    assert [item.media_hash for item in after.media] == [item.media_hash for item in before.media] != []
    assert after.token_ids[: len(before.token_ids)] == before.token_ids


def test_a_response_can_be_read_until_it_is_deleted(keeper: Client) -> None:
    body = ask(keeper)
    assert body["store"] is True
    assert get(keeper, body["id"]).json() == body
    streamed = stream(keeper)
    assert (streamed[0]["response"]["store"], streamed[-1]["response"]["store"]) == (True, True)
    assert get(keeper, streamed[-1]["response"]["id"]).json() == streamed[-1]["response"]
    deleted = keeper.send("DELETE", f"/v1/responses/{body['id']}")
    assert deleted.json() == {"id": body["id"], "object": "response", "deleted": True}
    assert error_of(get(keeper, body["id"])) == (404, "id", "response_not_found")
    assert error_of(keeper.send("DELETE", f"/v1/responses/{body['id']}"))[0] == 404
    assert error_of(post(keeper, previous_response_id=body["id"])) == (
        404,
        "previous_response_id",
        "response_not_found",
    )


def test_unstored_and_failed_responses_are_not_kept(keeper: Client) -> None:
    body = ask(keeper, store=False)
    assert body["store"] is False
    assert get(keeper, body["id"]).status_code == 404
    keeper.engine.fails_after = 2
    failed = stream(keeper)[-1]["response"]
    assert (failed["status"], failed["store"]) == ("failed", False)
    assert get(keeper, failed["id"]).status_code == 404


def test_an_answer_says_if_it_could_not_be_kept(keeper: Client) -> None:
    body = ask(keeper, metadata={str(each): "x" * 500 for each in range(16)}, instructions="y" * 1500)
    assert (body["status"], body["store"]) == ("completed", False)
    assert get(keeper, body["id"]).status_code == 404


def test_a_server_whose_folder_is_gone_still_answers(keeper: Client, tmp_path: Path) -> None:
    for each in tmp_path.iterdir():
        each.rename(each.with_suffix(".moved"))
    tmp_path.rename(gone := tmp_path.with_name("gone"))
    for body in (ask(keeper), stream(keeper)[-1]["response"]):
        assert (body["status"], body["store"]) == ("completed", False)
    gone.rename(tmp_path)


def test_a_response_cannot_be_read_in_part(keeper: Client) -> None:
    name = ask(keeper)["id"]
    assert get(keeper, f"{name}?stream=false&include[]=message.output_text.logprobs").status_code == 200
    for query in ("stream=true", "starting_after=3", "include=nothing"):
        assert error_of(get(keeper, f"{name}?{query}")) == (400, query.partition("=")[0], "unsupported_field")


def test_a_request_takes_space_only_while_it_is_answered(keeper: Client) -> None:
    for fails_after in (None, 0, 2):
        keeper.engine.fails_after = fails_after
        for _ in range(30):  # of 400 bytes each; there is room for 9,000
            post(keeper, input="x" * 300, stream=fails_after != 0)
    keeper.engine.fails_after = None
    assert ask(keeper)["store"] is True


def test_a_conversation_with_calls_continues_by_id(keeper: Client) -> None:
    keeper.engine.text = write_call("look", ARGUMENTS)
    first = ask(keeper, tools=[LOOK])
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "the sea"}
    keeper.engine.text = "It is the sea."
    second = ask(keeper, tools=[LOOK], input=[result], previous_response_id=first["id"])
    assert second["output"][0]["content"][0]["text"] == "It is the sea."
    assert "the sea" in keeper.preparer.tokenizer.decode(asked(keeper).token_ids)


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}])
def test_an_output_item_may_be_referenced_by_id(keeper: Client, kind: dict[str, Any]) -> None:
    user, again = {"role": "user", "content": "Hello"}, {"role": "user", "content": "And?"}
    [answered] = ask(keeper, input=[user])["output"]
    reference = {**kind, "id": answered["id"]}
    second = ask(keeper, input=[user, reference, again])
    ask(keeper, input=[user, answered, again], store=False)
    _, by_id, whole = keeper.engine.requests
    assert by_id.token_ids == whole.token_ids
    ask(keeper, input="So?", previous_response_id=second["id"])
    assert asked(keeper).token_ids[: len(whole.token_ids)] == whole.token_ids
    keeper.send("DELETE", f"/v1/responses/{second['id']}")
    unknown = post(keeper, input=[user, reference | {"id": second["output"][0]["id"]}, again])
    assert error_of(unknown) == (404, "input[1].id", "response_not_found")


def test_a_reference_to_a_deleted_response_ends_a_conversation(keeper: Client) -> None:
    user = {"role": "user", "content": "Hello"}
    first = ask(keeper, input=[user])
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    second = ask(keeper, input=[user, reference, {"role": "user", "content": "And?"}])
    keeper.send("DELETE", f"/v1/responses/{first['id']}")
    gone = post(keeper, input="So?", previous_response_id=second["id"])
    assert error_of(gone) == (404, "previous_response_id", "response_not_found")


def list_input(client: Client, name: str, query: str = "order=asc") -> dict[str, Any]:
    response = get(client, f"{name}/input_items?{query}")
    assert response.status_code == 200, response.text
    page: dict[str, Any] = response.json()
    ResponseItemList.model_validate(page)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    return page


def test_the_input_items_of_a_response_are_those_of_its_whole_conversation(keeper: Client) -> None:
    first = ask(keeper, input="Hello", instructions="Be short.")
    look = {"type": "input_image", "image_url": draw(7).data_url, "detail": "auto"}
    second = ask(keeper, input=[{"role": "user", "content": [look]}], previous_response_id=first["id"])
    hello, answered, picture = list_input(keeper, second["id"])["data"]
    text = {"type": "input_text", "text": "Hello"}
    message = {"type": "message", "status": "completed", "role": "user"}
    assert hello == {**message, "id": hello["id"], "content": [text]}
    assert answered == first["output"][0]
    assert picture == {**message, "id": picture["id"], "content": [look]}
    assert list_input(keeper, first["id"])["data"] == [hello]


def test_listed_items_have_what_the_caller_left_out(keeper: Client) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}", "id": None}
    result = {"type": "function_call_output", "call_id": "a", "output": "the sea", "status": "completed"}
    turns = [{"role": "user", "content": "Look!"}, {"role": "assistant", "content": "I do."}, call, result]
    data = list_input(keeper, ask(keeper, input=[*turns, {"role": "assistant"}])["id"])["data"]
    assert data[1]["content"] == [{"type": "output_text", "text": "I do.", "annotations": []}]
    assert data[2] == call | {"id": data[2]["id"], "status": "completed"}
    assert data[3] == result | {"id": data[3]["id"]}
    assert data[4]["content"] == []


def test_an_input_item_that_was_a_reference_is_listed_as_what_it_stood_for(keeper: Client) -> None:
    user = {"role": "user", "content": "Hello"}
    first = ask(keeper, input=[user])
    [answered] = first["output"]
    second = ask(keeper, input=[user, {"id": answered["id"]}, user])
    assert list_input(keeper, second["id"])["data"][1] == answered
    keeper.send("DELETE", f"/v1/responses/{first['id']}")
    assert error_of(get(keeper, f"{second['id']}/input_items")) == (404, "id", "response_not_found")


def test_input_items_come_in_pages_the_last_first_by_default(keeper: Client) -> None:
    sent = [{"role": ("user", "assistant")[at % 2], "content": str(at), "id": "a"} for at in range(4)]
    name = ask(keeper, input=sent)["id"]
    whole = list_input(keeper, name)
    assert [item["content"][0]["text"] for item in whole["data"]] == ["0", "1", "2", "3"]
    assert whole["has_more"] is False
    first = list_input(keeper, name, "limit=3")
    second = list_input(keeper, name, f"limit=3&after={first['last_id']}")
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert first["data"] + second["data"] == whole["data"][::-1]
    behind = get(keeper, f"{name}/input_items?after={second['last_id']}").json()
    assert (behind["data"], behind["first_id"], behind["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("limit=101", "invalid_argument"),
        ("order=up", "invalid_argument"),
        ("after=nothing", "invalid_argument"),
        ("include=nothing", "unsupported_field"),
        ("before=nothing", "unsupported_field"),
    ],
)
def test_a_list_of_input_items_that_cannot_be_had_is_refused(keeper: Client, query: str, code: str) -> None:
    name = ask(keeper)["id"]
    assert error_of(get(keeper, f"{name}/input_items?{query}")) == (400, query.partition("=")[0], code)
    assert list_input(keeper, name, "include[]=message.input_image.image_url")["data"]


@pytest.mark.parametrize("field", ["tools", "text"])
def test_a_schema_nested_too_deeply_to_be_repeated_is_refused(field: str) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    repeated: Any = {
        "tools": [FunctionTool("function", "look", parameters=deep)],
        "text": TextOptions(TextFormat("json_schema", "look", schema=deep)),
    }
    with pytest.raises(InvalidArgumentError, match="too deeply") as caught:
        ResponsesRequest(input="Hello", **{field: repeated[field]}).check()
    assert caught.value.field == field


def test_the_input_of_a_conversation_is_counted(keeper: Client) -> None:
    first = ask(keeper)
    counted = keeper.send(
        "POST", "/v1/responses/input_tokens", json={"input": "And?", "previous_response_id": first["id"]}
    )
    second = ask(keeper, input="And?", previous_response_id=first["id"])
    assert counted.json()["input_tokens"] == second["usage"]["input_tokens"]


def test_an_error_in_an_earlier_turn_says_so(keeper: Client) -> None:
    first = ask(keeper)
    long = post(keeper, input="x " * 3000, previous_response_id=first["id"])
    assert error_of(long) == (400, "input", "context_length_exceeded")
    wrong = post(keeper, input=[{"role": "user", "content": 3}], previous_response_id=first["id"])
    assert error_of(wrong)[1] == "input[0].content"


def test_responses_belong_to_the_key_that_asked_for_them(keeper: Client) -> None:
    keeper.settings = ApiSettings(api_keys=("one", "two"))
    [mine, others] = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
    asked_for = keeper.send("POST", "/v1/responses", json={"input": "Hello"}, headers=mine).json()
    assert get(keeper, asked_for["id"], headers=mine).status_code == 200
    assert get(keeper, asked_for["id"], headers=others).status_code == 404
    assert get(keeper, f"{asked_for['id']}/input_items", headers=mine).status_code == 200
    assert get(keeper, f"{asked_for['id']}/input_items", headers=others).status_code == 404
    assert get(keeper, asked_for["id"]).status_code == 401
    going_on = {"input": "And?", "previous_response_id": asked_for["id"]}
    assert keeper.send("POST", "/v1/responses", json=going_on, headers=others).status_code == 404
    assert keeper.send("POST", "/v1/responses", json=going_on, headers=mine).status_code == 200
