"""Anthropic's Messages API, with a fake engine. Anthropic's own client sends the requests, and judges the shapes and
the order of events.
"""

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter

from keepsight.api_settings import ApiSettings
from keepsight.errors import EngineLostError
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.call_text import PARAMETERS, TAGGED, write_call
from keepsight.frontend.prompt.render_prompt import ChatTemplate
from keepsight.requests import EngineRequest
from tests.drawn import draw
from tests.frontend.api.app_client import HELLO, MODEL, Client, FakeEngine
from tests.qwen_template import CODER_LIKE, QWEN_LIKE

LOOK = {"name": "look", "input_schema": {"type": "object"}}
GO = LOOK | {"name": "go", "description": "Somewhere.", "type": "custom"}
INPUT = '{"at": "the sea"}'
CALLS = f"{write_call('look', INPUT)}\n{write_call('go', '{}')}"
_event: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
OF_ANTHROPIC = {"anthropic-version": "2023-06-01"}


def post(client: Client, path: str = "", headers: Any = None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 99, "messages": HELLO} | fields
    given = {name: value for name, value in body.items() if value is not None}
    return client.send("POST", f"/v1/messages{path}", json=given, headers=headers)


def ask(client: Client, **fields: Any) -> dict[str, Any]:
    response = post(client, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    Message.model_validate(body)
    return body


def stream(client: Client, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking that each has Anthropic's shape."""
    response = post(client, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *written, rest = response.text.split("\n\n")
    assert rest == ""
    named = [each.split("\n") for each in written]
    events = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name for name, _ in named] == [f"event: {event['type']}" for event in events]
    for event in events:
        if event["type"] != "error":
            _event.validate_python(event)
    return events


def by_client(client: Client, do: Callable[[anthropic.AsyncAnthropic], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        transport = httpx2.ASGITransport(client.make_app(), raise_app_exceptions=False)
        terms: Any = {"api_key": "none", "base_url": "http://localhost", "max_retries": 0} | options
        async with anthropic.AsyncAnthropic(
            **terms, http_client=anthropic.DefaultAsyncHttpxClient(transport=transport)
        ) as official:
            return await do(official)

    return asyncio.run(run())


def gather(client: Client, **fields: Any) -> Message:
    """Return the message that the official client assembles from a stream."""

    async def run(official: anthropic.AsyncAnthropic) -> Any:
        asked: Any = {"model": MODEL, "max_tokens": 99, "messages": HELLO} | fields
        async with official.messages.stream(**asked) as events:
            return await events.get_final_message()

    message = by_client(client, run)
    assert isinstance(message, Message)
    return message


def error_of(response: httpx.Response) -> tuple[int, str, str]:
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    return response.status_code, body["error"]["type"], body["error"]["message"].partition(":")[0]


def asked(client: Client) -> EngineRequest:
    return client.engine.requests[-1]


def prompt_of(client: Client) -> str:
    return client.preparer.tokenizer.decode(asked(client).token_ids)


def picture(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


@pytest.fixture
def tagged(preparer: RequestPreparer) -> Client:
    """A client of a model whose template allows text before calls."""
    tagged = copy.copy(preparer)
    tagged.template = ChatTemplate(QWEN_LIKE, {})
    return Client(tagged, FakeEngine(tagged))


def test_an_answer_is_a_message_of_blocks(client: Client) -> None:
    body = ask(client)
    assert body.pop("id").startswith("msg_")
    assert body.pop("usage").keys() == {
        "input_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "output_tokens",
    }
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Red. Blue."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }


def test_a_message_request_is_prepared_like_a_chat(client: Client) -> None:
    url = draw(7).data_url
    of_chat = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    system = {"role": "system", "content": "Be short."}
    client.chat(messages=[system, {"role": "user", "content": of_chat}], temperature=0.5, top_k=7, stop=["x"])
    head, _, data = url.partition(";base64,")
    blocks = [
        picture(type="base64", media_type=head.removeprefix("data:"), data=data)
        | {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"type": "text", "text": "What is it?", "cache_control": {"type": "ephemeral"}},
    ]
    label = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0f3;"}
    ask(
        client,
        messages=[{"role": "user", "content": blocks}],
        system=[label, {"type": "text", "text": "Be short."}],
        temperature=0.5,
        top_k=7,
        stop_sequences=["x"],
    )
    first, second = client.engine.requests
    assert first.token_ids == second.token_ids
    assert [item.media_hash for item in first.media] == [item.media_hash for item in second.media] != []
    assert first.sampling_params.top_k == second.sampling_params.top_k == 7
    assert (second.sampling_params.stop, second.sampling_params.max_tokens) == (first.sampling_params.stop, 99)


def test_usage_separates_cached_and_uncached_tokens(client: Client) -> None:
    client.engine.num_cached_tokens = {0: 5}
    whole, streamed = ask(client)["usage"], stream(client)
    num_tokens = len(asked(client).token_ids)
    assert (whole["input_tokens"], whole["cache_read_input_tokens"]) == (num_tokens - 5, 5)
    assert streamed[-2]["usage"] == whole
    assert streamed[0]["message"]["usage"] == whole | {"output_tokens": 0}


def test_a_stream_has_the_content_of_the_whole_answer(client: Client) -> None:
    kinds = [event["type"] for event in stream(client)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    client.engine.text = CALLS
    for fields in ({}, {"tools": [LOOK, GO]}):
        whole, gathered = ask(client, **fields), json.loads(gather(client, **fields).to_json())
        for block in (*whole["content"], *gathered["content"]):
            block.pop("id", None)
        assert {name: gathered[name] for name in whole.keys() - {"id"}} | {"id": whole["id"]} == whole


@pytest.mark.parametrize(
    ("text", "end", "fields", "expected"),
    [
        ("Red. Blue.", "length", {}, ("max_tokens", None)),
        ("Red. Blue.", "stop", {"stop_sequences": ["Blue"]}, ("stop_sequence", "Blue")),
        (CALLS, "stop", {"tools": [LOOK, GO]}, ("tool_use", None)),
        (CALLS, "stop", {"tools": [LOOK, GO], "tool_choice": {"type": "tool", "name": "look"}}, ("tool_use", None)),
        (CALLS[:30], "length", {"tools": [LOOK, GO]}, ("max_tokens", None)),
        (CALLS, "stop", {"tools": [LOOK], "stop_sequences": ["sea"]}, ("stop_sequence", "sea")),
    ],
)
def test_an_answer_says_why_it_ended(client: Client, text: str, end: Any, fields: Any, expected: Any) -> None:
    client.engine.text, client.engine.end = text, end
    for body in (ask(client, **fields), stream(client, **fields)[-2]["delta"]):
        assert (body["stop_reason"], body["stop_sequence"]) == expected


def test_an_empty_answer_is_an_empty_text_block(client: Client) -> None:
    client.engine.token_ids = [6]
    assert ask(client)["content"] == [{"type": "text", "text": ""}]
    assert gather(client).content[0].to_dict() == {"type": "text", "text": ""}


def test_a_call_that_was_cut_off_has_no_input(client: Client) -> None:
    client.engine.text, client.engine.end = CALLS.partition("the")[0], "length"
    [block] = ask(client, tools=[LOOK])["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "look", {})


def test_calls_and_their_results_can_be_sent_back(tagged: Client) -> None:
    tagged.engine.text = call = f"I look.\n{write_call('look', INPUT, TAGGED)}"
    message = gather(tagged, tools=[LOOK])
    first = prompt_of(tagged)
    assert [block.type for block in message.content] == ["text", "tool_use"]
    called: Any = message.content[1]
    seen = [{"type": "text", "text": "the sea"}]
    result = {"type": "tool_result", "tool_use_id": called.id, "content": seen, "is_error": False}
    turns = [*HELLO, message.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    assert gather(tagged, tools=[LOOK], messages=turns).stop_reason == "tool_use"
    second = prompt_of(tagged)
    assert second.startswith(f"{first}{call}<|im_end|>")
    assert "the sea\n</tool_response>" in second
    assert second.index("</tool_response>") < second.index("And?")


def test_parameters_are_the_input_of_a_block_and_can_be_sent_back(preparer: RequestPreparer) -> None:
    coder = copy.copy(preparer)
    coder.template = ChatTemplate(CODER_LIKE, {})
    client = Client(coder, FakeEngine(coder))
    properties = {"at": {"type": "string"}, "times": {"type": "integer"}, "sure": {"type": "boolean"}}
    tool = LOOK | {"input_schema": {"type": "object", "properties": properties}}
    client.engine.text = call = write_call("look", '{"at": "7", "times": 3, "sure": true}', PARAMETERS)
    message = gather(client, tools=[tool])
    [called] = [block.to_dict() for block in message.content]
    assert (called["input"], message.stop_reason) == ({"at": "7", "times": 3, "sure": True}, "tool_use")
    first = prompt_of(client)
    result = {"type": "tool_result", "tool_use_id": called["id"], "content": "the sea"}
    gather(client, tools=[tool], messages=[*HELLO, message.to_param(), {"role": "user", "content": [result]}])
    assert prompt_of(client).startswith(f"{first}{call}<|im_end|>")
    client.engine.text, client.engine.end = call.partition("3")[0], "length"
    assert [block["input"] for block in ask(client, tools=[tool])["content"]] == [{}]


def test_a_last_message_of_the_assistant_is_continued(client: Client) -> None:
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    ask(client, messages=begun)
    client.chat(messages=begun, continue_final_message=True)
    of_messages, of_chat = client.engine.requests
    assert of_messages.token_ids == of_chat.token_ids


@pytest.mark.parametrize("content", ["", " \n", [{"type": "text", "text": ""}]])
def test_a_blank_last_message_of_the_assistant_begins_an_answer_like_none(tagged: Client, content: Any) -> None:
    ask(tagged, messages=HELLO)
    ask(tagged, messages=[*HELLO, {"role": "assistant", "content": content}])
    without, blank = tagged.engine.requests
    assert blank.token_ids == without.token_ids


def test_a_last_message_with_only_a_thought_is_continued_after_it(client: Client) -> None:
    ask(client, messages=HELLO)
    ask(client, messages=[*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Well"}]}])
    without, thought = client.engine.requests
    assert thought.token_ids == without.token_ids


def test_consecutive_turns_are_merged_and_a_later_system_message_stays_in_place(client: Client) -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "Be kind."}]}
    answered = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Hello"}]
    ask(client, system="Be short.", messages=[{"role": "system", "content": "Be good."}, *HELLO, later, *answered])
    client.chat(
        messages=[
            {"role": "system", "content": "Be short.\n\nBe good."},
            {"role": "user", "content": "Hello\n\nBe kind."},
            *answered,
        ]
    )
    of_messages, of_chat = client.engine.requests
    assert of_messages.token_ids == of_chat.token_ids


def test_a_picture_between_texts_of_two_messages_stays_there(client: Client) -> None:
    look = picture(type="url", url=draw(7).data_url)
    first = {"role": "user", "content": [{"type": "text", "text": "One."}, look, {"type": "text", "text": "Two."}]}
    ask(client, messages=[first, {"role": "user", "content": "Three."}, {"role": "user", "content": [look]}])
    prompt = prompt_of(client)
    assert prompt.index("One.") < prompt.index("Two.\n\nThree.")
    assert len(asked(client).media) == 2


def test_the_tokens_are_counted_without_an_answer(client: Client) -> None:
    fields: Any = {"system": "Be short.", "tools": [LOOK]}
    counted = post(client, "/count_tokens", max_tokens=None, **fields).json()
    usage = ask(client, **fields)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}

    async def count(official: anthropic.AsyncAnthropic) -> Any:
        messages: Any = HELLO
        return await official.beta.messages.count_tokens(model=MODEL, messages=messages, **fields)

    assert by_client(client, count).input_tokens == counted["input_tokens"]


def test_fields_that_change_nothing_are_accepted(client: Client) -> None:
    nothing: dict[str, Any] = {
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "metadata": {"user_id": "somebody"},
        "service_tier": "auto",
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "cache_control": {"type": "ephemeral"},
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [LOOK | {"defer_loading": False, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    headers = {**OF_ANTHROPIC, "anthropic-beta": "a,b"}
    response = post(client, "?beta=true", headers, **nothing)
    assert response.status_code == 200, response.text


def test_an_output_schema_is_passed_to_the_engine(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    form = asked(client).sampling_params.structured_outputs
    assert form is not None
    assert form.json == json.dumps(schema)


def test_the_account_is_returned_on_request(client: Client) -> None:
    assert ask(client, keepsight={"account": True})["keepsight"]["accounts"]
    assert stream(client, keepsight={"account": True})[-2]["keepsight"]["accounts"]


def test_a_key_may_come_in_either_header_at_these_paths_alone(client: Client) -> None:
    client.settings = ApiSettings(api_keys=("one",))
    for headers in ({"x-api-key": "one"}, {"Authorization": "Bearer one"}):
        assert post(client, headers=headers).status_code == 200
        assert post(client, "/count_tokens", headers, max_tokens=None).status_code == 200
    for headers in ({}, {"x-api-key": "two"}, {"x-api-key": "one", "Authorization": "Bearer two"}):
        assert error_of(post(client, headers=headers))[:2] == (401, "authentication_error")
    assert client.chat(headers={"x-api-key": "one"}).status_code == 401


def test_requests_with_the_header_of_anthropics_clients_are_its_apis_at_other_paths_too(client: Client) -> None:
    client.settings = ApiSettings(api_keys=("one",))
    key = {"x-api-key": "one"}
    assert client.send("GET", "/v1/models", headers=OF_ANTHROPIC | key).status_code == 200
    assert error_of(client.send("GET", "/v1/models/other", headers=OF_ANTHROPIC | key))[:2] == (404, "not_found_error")
    assert error_of(client.send("GET", "/v1/models", headers=OF_ANTHROPIC))[:2] == (401, "authentication_error")
    assert client.send("GET", "/v1/models", headers=key).status_code == 401
    assert error_of(post(client, "/batches", headers=key))[:2] == (404, "not_found_error")


def test_anthropics_client_reads_the_id_of_a_request(client: Client) -> None:
    async def name_both(official: anthropic.AsyncAnthropic) -> Any:
        headers, messages = {"x-request-id": "mine"}, HELLO
        asked: Any = {"model": MODEL, "max_tokens": 9, "messages": messages, "extra_headers": headers}
        with pytest.raises(anthropic.NotFoundError) as caught:
            await official.messages.create(**asked | {"model": "other"})
        return (await official.messages.create(**asked))._request_id, caught.value.request_id

    assert by_client(client, name_both) == ("mine", "mine")
    assert "request-id" not in client.chat().headers


def test_models_are_listed_in_the_shapes_of_both_apis(client: Client) -> None:
    async def list_models(official: anthropic.AsyncAnthropic) -> Any:
        return [await official.models.retrieve(MODEL), *[each async for each in official.models.list()]]

    for model in by_client(client, list_models):
        ModelInfo.model_validate(model.model_dump(), strict=True)
        assert (model.id, model.display_name, model.max_input_tokens) == (MODEL, MODEL, 2048)
        assert model.created_at.timestamp() == model.created > 1_700_000_000
        assert openai.types.Model.model_validate(model.model_dump()).owned_by == "keepsight"


def test_a_failure_after_the_first_token_is_the_last_event(client: Client) -> None:
    client.engine.fails_after = 2
    last = stream(client)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "broke" not in last["error"]["message"]
    client.engine.failure = EngineLostError("gone", had_begun=True)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        gather(client)
    client.engine.fails_after = 0
    assert error_of(post(client, stream=True))[:2] == (503, "overloaded_error")


TOO_LONG = [{"role": "user", "content": "x " * 3000}]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"n": 1}, "n"),
        ({"stop": "x"}, "stop"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"metadata": {"name": "me"}}, "metadata.name"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"chat_template_kwargs": {"depth": 3}}, "chat_template_kwargs.depth"),
        ({"mm_processor_kwargs": {"resample": 3}}, "mm_processor_kwargs.resample"),
        ({"cache_control": {"type": "for_ever"}}, "cache_control.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
         "output_config.format.schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [LOOK | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [LOOK | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "go"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": TOO_LONG}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_errors_use_the_field_names_of_this_api(client: Client, fields: dict[str, Any], field: str) -> None:
    status, kind, message = error_of(post(client, **fields))
    assert (status, kind) in ((400, "invalid_request_error"), (404, "not_found_error"))
    assert message == field
    assert client.engine.requests == []


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([picture(type="base64", media_type="image/png", data="AAAA")], "source.data"),
        ([picture(type="base64", media_type="text/plain", data="AAAA")], "source.media_type"),
        ([picture(type="url", url="gopher://x")], "source.url"),
        ([picture(type="file", file_id="nothing")], "source.file_id"),
        ([picture(type="folder")], "source.type"),
        ([{"type": "image"}], "source"),
        ([{"type": "document"}], "source"),
        ([document(type="base64", media_type="application/pdf", data="AAAA")], "source.data"),
        ([document(type="base64", media_type="text/plain", data="AAAA")], "source.media_type"),
        ([document(type="text", media_type="text/html", data="a")], "source.media_type"),
        ([document(type="url", url="gopher://x")], "source.url"),
        ([document(type="file", file_id="file-1")], "source.file_id"),
        ([document(type="content", content=[{"type": "tool_use"}])], "source.content[0].type"),
        ([document(type="base64", media_type="application/pdf", data="AAAA") | {"title": "a" * 501}], "title"),
        ([document(type="text", media_type="text/plain", data="a") | {"citations": {"enabled": True}}],
         "citations.enabled"),
        ([{"type": "text", "text": 3}], "text"),
        ([{"type": "text", "text": "a", "colour": "red"}], "colour"),
        ([{"type": "text", "text": "a", "citations": [{}]}], "citations"),
        ([{"type": "tool_use", "id": "b", "name": "look", "input": {}}], "type"),
        ([{"type": "tool_result", "tool_use_id": "b", "content": "x"}], "tool_use_id"),
        ([{"type": "tool_result", "tool_use_id": "a", "content": [picture(type="url", url="data:,")]}],
         "content[0].source.url"),
    ],
)  # fmt: skip
def test_errors_name_the_field_that_caused_them(client: Client, content: Any, field: str) -> None:
    before: list[Any] = [*HELLO, USE]
    response = post(client, messages=[*before, {"role": "user", "content": content}])
    assert error_of(response) == (400, "invalid_request_error", f"messages[2].content[0].{field}")
    assert client.engine.requests == []


def test_a_file_that_is_not_a_picture_is_refused_with_its_type(client: Client) -> None:
    content = [picture(type="base64", media_type="application/pdf", data="AAAA")]
    message = post(client, messages=[{"role": "user", "content": content}]).json()["error"]["message"]
    assert message.endswith("source.media_type: must be a picture's, such as 'image/png', not 'application/pdf'")


def test_other_errors_have_the_shape_of_this_api_too(client: Client) -> None:
    assert error_of(client.send("GET", "/v1/messages"))[:2] == (405, "invalid_request_error")
    assert error_of(client.send("POST", "/v1/messages", content=b"{"))[:2] == (400, "invalid_request_error")
    client.engine.fails_after = 0
    assert error_of(post(client))[:2] == (500, "api_error")
    assert error_of(post(client, messages=[*HELLO, USE])) == (400, "invalid_request_error", "messages")
