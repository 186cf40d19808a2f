"""Chat completions and the smaller routes of the API, with the app in process."""

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from keepsight import StructuredOutputsParams, __version__
from keepsight.api_settings import ApiSettings
from keepsight.errors import EngineLostError, InvalidArgumentError, MediaWorkersLostError, RequestFailedError
from keepsight.frontend.api.answer import Answer
from keepsight.frontend.api.answer_chat import ChatAnswer
from keepsight.frontend.api.answer_completion import CompletionAnswer
from keepsight.frontend.api.answer_responses import ResponsesAnswer
from keepsight.frontend.api.app import create_app
from keepsight.frontend.api.kept_responses import KeptResponses
from keepsight.frontend.api.responses_request import LOGPROBS
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt import check_grammar
from keepsight.frontend.prompt.lift_data_urls import MIN_BYTES, LiftedUrl
from keepsight.observe.catalogue import RESPONSES
from keepsight.observe.counters import Counters
from keepsight.requests import TierStatus
from tests.drawn import ask, by_url, draw, to_data_url, to_png
from tests.frontend.api.app_client import HELLO, MODEL, Client, FakeEngine, complete, error_of
from tests.wait_until import wait_until


def test_a_response_format_and_tools_are_passed_on_or_refused_by_field_name(client: Client, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert client.chat(response_format=asked).status_code == 200
    [request] = engine.requests
    assert request.sampling_params.structured_outputs == StructuredOutputsParams(json=schema)
    asked["json_schema"]["schema"] = {"type": "thing"}  # type: ignore[index]
    field = "response_format.json_schema.schema"
    assert error_of(client.chat(response_format=asked)) == (400, field, "invalid_argument")
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert client.chat(tools=tools).status_code == 200
    assert client.chat(tools=tools, tool_choice="none").status_code == 200


# Answers ------------------------------------------------------------------------------------------------------


def test_an_answer_has_the_shape_of_openai_s(client: Client, engine: FakeEngine) -> None:
    response = client.chat()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    [request] = engine.requests
    num_prompt, num_answer = len(request.token_ids), len(client.preparer.tokenizer.encode(engine.text)) + 1
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Red. Blue.", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": {
                "cached_tokens": 0,
                "image_tokens": 0,
                "audio_tokens": 0,
                "text_tokens": num_prompt,
            },
        },
    }


def test_the_fields_of_a_request_reach_the_engine(client: Client, engine: FakeEngine) -> None:
    picture = draw(7).picture.resize((640, 300))
    messages = ask(by_url(picture), "What is this?")
    options = {"temperature": 0.5, "seed": 3, "max_completion_tokens": 7, "stop": "x", "top_k": 4}
    usage = client.chat(messages=messages, **options).json()["usage"]
    assert usage["prompt_tokens_details"]["image_tokens"] == 16
    cropped = client.chat(messages=messages, mm_processor_kwargs={"do_pan_and_scan": True}).json()["usage"]
    assert cropped["prompt_tokens_details"]["image_tokens"] == 3 * 16
    first, second = engine.requests
    params = first.sampling_params
    assert (params.temperature, params.seed, params.max_tokens, params.stop, params.top_k) == (0.5, 3, 7, ("x",), 4)
    assert [len(each.media) for each in (first, second)] == [1, 3]
    assert second.sampling_params.max_tokens is None
    assert (first.cache_salt, first.priority) == (None, 0)
    client.chat(messages=messages, cache_salt="mine", priority=-3)
    third = engine.requests[-1]
    assert (third.cache_salt, third.priority) == ("mine", -3)
    assert third.media[0].media_hash != first.media[0].media_hash


def test_an_answer_continues_the_last_message_if_requested(client: Client, engine: FakeEngine) -> None:
    messages = [*ask("What is this?"), {"role": "assistant", "content": "It is a"}]
    for options in ({"add_generation_prompt": False, "continue_final_message": True}, {"continue_final_message": True}):
        assert client.chat(messages=messages, **options).status_code == 200
        assert client.preparer.tokenizer.decode(engine.requests[-1].token_ids).endswith("It is a")
        body = client.send("POST", "/tokenize", json={"messages": messages, **options}).json()
        assert body["tokens"] == list(engine.requests[-1].token_ids)
    client.chat(messages=messages, add_generation_prompt=False)
    ended = client.preparer.tokenizer.decode(engine.requests[-1].token_ids, skip_special_tokens=False)
    assert ended.endswith("It is a<end_of_turn>\n")
    both = client.chat(messages=messages, add_generation_prompt=True, continue_final_message=True)
    assert (both.status_code, both.json()["error"]["param"]) == (400, "continue_final_message")


def test_a_server_may_let_requests_set_processor_options(client: Client, engine: FakeEngine) -> None:
    client.settings = ApiSettings(trust_request_mm_processor_kwargs=True)
    messages = ask(by_url(draw(7).picture.resize((1600, 400))), "What is this?")
    options = [{"do_pan_and_scan": True, "pan_and_scan_max_num_crops": count} for count in (2, 4)]
    for asked in ({}, {"resample": 0}, *options):
        client.chat(messages=messages, mm_processor_kwargs=asked)
    default, nearest, few, many = engine.requests
    assert default.media[0].media_hash != nearest.media[0].media_hash
    assert len(few.media) < len(many.media)
    refused = client.chat(messages=messages, mm_processor_kwargs={"resample": 77})
    assert error_of(refused) == (400, "mm_processor_kwargs.resample", "invalid_argument")
    counted = client.send("POST", "/tokenize", json={"messages": messages, "mm_processor_kwargs": options[1]})
    assert counted.json()["count"] == len(many.token_ids)


def test_choices_have_their_own_index_and_text(client: Client) -> None:
    choices = client.chat(n=2).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert {choice["message"]["content"] for choice in choices} == {"Red. Blue."}
    for index in (0, 1):
        own = [c for chunk in client.stream(n=2) for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Red. Blue."
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_a_stop_string_ends_the_answer_and_the_engine_s_work(client: Client, engine: FakeEngine) -> None:
    [choice] = client.chat(stop=[" Blue"]).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("Red.", "stop", " Blue")
    assert engine.num_abandoned == 1
    chunks = client.stream(stop=[" Blue"])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Red."
    assert chunks[-1]["choices"][0]["stop_reason"] == " Blue"
    assert engine.num_abandoned == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_ends_at_a_stop_string_is_stopped_in_the_engine(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    client.chat(n=2, stop=[" Blue"], stream=stream)
    [request] = engine.requests
    assert engine.stopped == [(request.request_id, 0), (request.request_id, 1)]
    stopped_at = engine.preparer.tokenizer.encode("Red. Blue.").index(engine.preparer.tokenizer.encode("Red. Blue")[-1])
    assert engine.num_read == 2 * (stopped_at + 1)


def test_a_choice_that_the_engine_ended_is_not_stopped_again(client: Client, engine: FakeEngine) -> None:
    engine.end = "length"
    client.chat(n=2, stop=["."])  # each choice ends at its first period
    client.chat(n=2, stop=["never said"])
    assert {choice for _, choice in engine.stopped} == {0, 1}
    assert {request_id for request_id, _ in engine.stopped} == {engine.requests[0].request_id}


def test_usage_counts_cached_tokens_of_the_first_choice_only(client: Client, engine: FakeEngine) -> None:
    engine.num_cached_tokens = {0: 3, 1: 8}
    assert client.chat(n=2).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    *_, last = client.stream(n=2, stream_options={"include_usage": True})
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def test_usage_counts_accepted_and_rejected_prediction_tokens(client: Client, engine: FakeEngine) -> None:
    assert "completion_tokens_details" not in client.chat().json()["usage"]
    engine.num_guessed = {0: 2, 1: 1}
    asked: dict[str, Any] = {"prediction": {"type": "content", "content": "Red. Blue."}, "n": 2}
    usage = client.chat(**asked).json()["usage"]
    num_predicted = len(engine.requests[-1].predicted)
    assert num_predicted > 2
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0, "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2 * num_predicted - 3,
    }  # fmt: skip
    *_, last = client.stream(**asked, stream_options={"include_usage": True})
    assert last["usage"] == usage


def test_a_stream_is_chunks_of_one_answer(client: Client) -> None:
    chunks = client.stream()
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Red. Blue."
    assert len(chunks) > 4


def test_usage_comes_last_in_a_stream_that_asks_for_it(client: Client) -> None:
    *chunks, last = client.stream(stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == client.chat().json()["usage"]


def test_logprobs_contain_each_token_s_bytes(client: Client, engine: FakeEngine) -> None:
    engine.end = "length"
    [choice] = client.chat(logprobs=True, top_logprobs=2).json()["choices"]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content) == b"Red. Blue."
    assert {token["logprob"] for token in content} == {-0.5}
    assert {len(token["top_logprobs"]) for token in content} == {2}
    chunks = client.stream(logprobs=True)
    streamed = [token for chunk in chunks for token in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == [token | {"top_logprobs": []} for token in content]


def test_every_token_s_logprob_is_streamed_even_while_its_text_is_held_back(client: Client, engine: FakeEngine) -> None:
    engine.end = "length"
    chunks = client.stream(logprobs=True, stop=["Red. Blue. Green"])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Red. Blue."
    num_logprobs = sum(len((chunk["choices"][0]["logprobs"] or {"content": []})["content"]) for chunk in chunks)
    assert num_logprobs == len(client.preparer.tokenizer.encode(engine.text))


def test_without_an_engine_requests_are_told_when_to_retry(client: Client, engine: FakeEngine) -> None:
    engine.num_engines = 0
    status = "the engine is being started again"
    ready = client.send("GET", "/ready")
    assert (ready.status_code, ready.headers["Retry-After"], ready.json()) == (503, "2", {"status": status})
    health = client.send("GET", "/health")
    assert (health.status_code, health.json()) == (
        200,
        {"status": status, "engines": 0, "silent_engines": 0, "requests": 0},
    )


@pytest.mark.parametrize(
    ("num_engines", "code", "status"), [(1, 503, "the engine gives no sign of life"), (2, 200, "ok")]
)
def test_a_server_is_not_ready_while_all_its_engines_are_silent(
    client: Client, engine: FakeEngine, num_engines: int, code: int, status: str
) -> None:
    engine.num_engines, engine.num_silent_engines = num_engines, 1
    ready, health = client.send("GET", "/ready"), client.send("GET", "/health")
    assert (ready.status_code, ready.json()) == (code, {"status": status})
    said = {"status": status, "engines": num_engines, "silent_engines": 1, "requests": 0}
    assert (health.status_code, health.json()) == (200, said)


def test_health_lists_tiers_and_why_one_is_set_aside(client: Client, engine: FakeEngine) -> None:
    good = TierStatus("encoder", "host", None, 10, 100, 1, 5, 0, 0)
    engine.tiers = {0: (good, TierStatus("encoder", "remote", "TimeoutError: 2 s", 0, None, 0, 0, 0, 0))}
    host, remote = client.send("GET", "/health").json()["tiers"]
    assert (host["engine"], host["name"], host["status"], host["num_hits"]) == (0, "host", "ok", 5)
    assert (remote["status"], remote["reason"]) == ("set aside", "TimeoutError: 2 s")


def test_an_answer_lost_with_its_engine_is_a_retryable_error(client: Client, engine: FakeEngine) -> None:
    engine.fails_after, engine.failure = 0, EngineLostError("the engine's process has ended")
    lost = client.chat()
    assert error_of(lost) == (503, None, "engine_lost")
    assert lost.headers["Retry-After"] == "2"


@pytest.mark.parametrize(("had_begun", "num_asked"), [(True, 3), (False, 1)])
def test_a_request_is_retried_after_an_engine_died_only_if_it_had_begun(
    client: Client, engine: FakeEngine, had_begun: bool, num_asked: int
) -> None:
    engine.fails_after, engine.failure = 0, EngineLostError("the engine's process has ended", had_begun=had_begun)
    assert error_of(client.chat()) == (503, None, "engine_lost")
    assert len(engine.requests) == num_asked
    # Another engine may still have tokens under way for a request that was lost only because its sibling was.
    assert len({each.request_id for each in engine.requests}) == num_asked


@pytest.mark.parametrize(("num_engines", "status"), [(1, 200), (0, 503)])
def test_a_router_learns_what_is_served(client: Client, engine: FakeEngine, num_engines: int, status: int) -> None:
    client.digests, engine.num_engines = {"model": "1"}, num_engines
    ready = client.send("GET", "/ready")
    assert (ready.status_code, ready.json()["serves"]) == (status, {"model": "1"})


def test_the_smaller_routes_answer(client: Client) -> None:
    assert client.send("GET", "/health").json() == {"status": "ok", "engines": 1, "silent_engines": 0, "requests": 0}
    assert client.send("GET", "/ready").json() == {"status": "ok"}
    assert client.send("GET", "/version").json() == {"version": __version__}
    [model] = client.send("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 2048)
    assert client.send("GET", f"/v1/models/{MODEL}").json()["id"] == MODEL
    [again] = client.send("GET", "/v1/models/").json()["data"]
    # Each of the two was sent to a server of its own.
    started = {"created": 0, "created_at": ""}
    assert again | started == model | started


def test_the_model_s_length_is_that_of_the_current_engines(
    preparer: RequestPreparer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(preparer, engine, MODEL)
    monkeypatch.setattr(preparer, "max_model_len", 512)

    async def ask_both() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            listed, named = await client.get("/v1/models"), await client.get(f"/v1/models/{MODEL}")
            return [*listed.json()["data"], named.json()]

    assert [card["max_model_len"] for card in asyncio.run(ask_both())] == [512, 512]


def test_an_empty_model_name_means_the_default(client: Client) -> None:
    assert client.chat(messages=ask("Hello"), model="").json()["model"] == MODEL


# Refusals -----------------------------------------------------------------------------------------------------

NO_COMMA = ask({"type": "image_url", "image_url": {"url": "data:image/png;base64"}})
URL_FIELD = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "other"}, (404, "model", "model_not_found")),
        ({"temperature": -1}, (400, "temperature", "invalid_argument")),
        ({"temperature": "hot"}, (400, "temperature", "invalid_argument")),
        ({"n": 0}, (400, "n", "invalid_argument")),
        ({"messages": []}, (400, "messages", "invalid_argument")),
        ({"messages": [{"role": "user"}]}, (400, "messages[0].content", "invalid_argument")),
        ({"temprature": 1}, (400, "temprature", "unsupported_field")),
        ({"cache_salt": ""}, (400, "cache_salt", "invalid_argument")),
        ({"cache_salt": 5}, (400, "cache_salt", "invalid_argument")),
        ({"priority": "high"}, (400, "priority", "invalid_argument")),
        ({"priority": True}, (400, "priority", "invalid_argument")),
        ({"priority": 2**63}, (400, "priority", "invalid_argument")),
        ({"tools": [{}]}, (400, "tools[0].type", "invalid_argument")),
        ({"mm_processor_kwargs": {"do_pan": True}}, (400, "mm_processor_kwargs.do_pan", "unsupported_field")),
        ({"mm_processor_kwargs": {"resample": 0}}, (400, "mm_processor_kwargs.resample", "unsupported_field")),
        ({"stream_options": {}}, (400, "stream_options", "invalid_argument")),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, (400, "messages", "context_length_exceeded")),
        ({"messages": [{"role": "user", "content": "<start_of_image>"}]}, (400, "messages", "picture_count")),
        ({"messages": [{"role": "user", "content": "<image_soft_token>"}]}, (400, "messages", "reserved_token")),
        ({"messages": HELLO + HELLO}, (400, "messages", "chat_template")),
        ({"messages": NO_COMMA}, (400, URL_FIELD, "picture_unreadable")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_invalid_request_gets_an_openai_error_that_names_the_field(
    client: Client, engine: FakeEngine, fields: dict[str, Any], error: tuple[int, str, str], stream: bool
) -> None:
    assert (
        error_of(client.chat(**({"stream": True} if stream and "stream_options" not in fields else {}), **fields))
        == error
    )
    assert not engine.requests


def test_a_body_that_is_not_json_is_refused(client: Client) -> None:
    for content in (b"", b"{", b"[]", b"\xff", b"null", b"[" * 10_000):
        response = client.send("POST", "/v1/chat/completions", content=content)
        assert error_of(response) == (400, "body", "invalid_argument"), content


def test_a_body_beyond_the_limit_is_refused(client: Client) -> None:
    client.settings = ApiSettings(max_body_bytes=500)
    assert client.chat().status_code == 200
    response = client.chat(messages=[{"role": "user", "content": "a" * 500}])
    assert error_of(response) == (413, "body", "body_too_large")
    assert "500" in response.json()["error"]["message"]


def test_other_routes_and_methods_are_refused_in_the_same_shape(client: Client) -> None:
    assert error_of(client.send("GET", "/v1/nothing")) == (404, None, None)
    response = client.send("GET", "/v1/chat/completions")
    assert error_of(response) == (405, None, None)
    assert response.headers["allow"] == "POST"
    assert error_of(client.send("DELETE", "/v1/models")) == (405, None, None)
    assert error_of(client.send("GET", "/v1/models/other/one")) == (404, "model", "model_not_found")
    message = client.send("POST", "/v1/batches").json()["error"]["message"]
    assert message == "POST /v1/batches: Not Found; GET /openapi.json lists all paths"
    message = client.send("POST", "/generate").json()["error"]["message"]
    assert message.startswith("POST /generate: Not Found; did you mean /v1/completions? GET /openapi.json")
    message = client.send("POST", "http://localhost//v1/completions").json()["error"]["message"]
    assert message.startswith("POST //v1/completions: Not Found; did you mean /v1/completions?")


def test_a_stream_is_neither_cached_nor_gathered_on_its_way(client: Client) -> None:
    headers = client.chat(stream=True).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


def test_a_path_behind_a_proxys_prefix_is_proposed_with_it(client: Client) -> None:
    async def ask_ping() -> httpx.Response:
        transport = httpx.ASGITransport(client.make_app(), root_path="/keepsight")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get("/keepsight/ping")

    message = asyncio.run(ask_ping()).json()["error"]["message"]
    assert message.startswith("GET /keepsight/ping: Not Found; did you mean /keepsight/health?")


# Failures -----------------------------------------------------------------------------------------------------


def test_a_failing_engine_is_a_server_error_without_internal_details(client: Client, engine: FakeEngine) -> None:
    engine.fails_after = 2
    response = client.chat()
    assert error_of(response) == (500, None, None)
    assert "broke" not in response.text
    chunks = client.stream()
    assert chunks[-1]["error"]["type"] == "server_error"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


PNG = to_png(draw(1).picture)
CUT_PICTURE = {"type": "image_url", "image_url": {"url": to_data_url(PNG[: len(PNG) // 2])}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_picture_is_a_client_error_even_if_found_while_decoding(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    response = client.chat(messages=ask(CUT_PICTURE), stream=stream)
    assert error_of(response) == (400, URL_FIELD, "picture_unreadable")
    assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("is_refusal", "error"), [(True, (400, None, "cannot_fit")), (False, (500, None, None))])
def test_an_engine_s_refusal_is_a_client_error_and_its_failure_a_server_error(
    client: Client, engine: FakeEngine, stream: bool, is_refusal: bool, error: tuple[int, None, str | None]
) -> None:
    engine.fails_after, engine.failure = 0, RequestFailedError("9 blocks of 5", is_refusal=is_refusal)
    response = client.chat(stream=stream)
    assert error_of(response) == error
    assert ("9 blocks of 5" in response.text) == is_refusal


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_for_lack_of_media_workers_is_retryable(client: Client, engine: FakeEngine, stream: bool) -> None:
    engine.fails_after, engine.failure = 0, MediaWorkersLostError("none can be started")
    response = client.chat(stream=stream)
    assert error_of(response) == (503, None, "media_workers_lost")
    assert "retry-after" in response.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_grammar_that_the_engine_refuses_is_reported_under_the_caller_s_field(
    client: Client, engine: FakeEngine, stream: bool, asked: dict[str, Any], field: str
) -> None:
    engine.fails_after, engine.failure = 0, InvalidArgumentError("structured_outputs.choice", "too large")
    assert error_of(client.chat(stream=stream, **asked)) == (400, field, "invalid_argument")


def test_a_grammar_that_fails_late_ends_its_stream_without_an_error_in_the_log(
    client: Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.fails_after, engine.failure = 2, InvalidArgumentError("structured_outputs.choice", "too large")
    *_, last = client.stream(guided_choice=["a"])
    assert (last["error"]["param"], last["error"]["code"]) == ("guided_choice", "invalid_argument")
    assert not [each for each in caplog.records if each.levelname == "ERROR" or each.exc_info]


def test_a_stream_that_is_refused_late_ends_with_an_error_event(client: Client, engine: FakeEngine) -> None:
    engine.fails_after, engine.failure = 2, RequestFailedError("9 blocks of 5", is_refusal=True)
    *_, last = client.stream()
    assert (last["error"]["message"], last["error"]["code"]) == ("9 blocks of 5", "cannot_fit")


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_and_is_counted_only_if_answered(
    client: Client, engine: FakeEngine, stream: bool, has_begun: bool
) -> None:
    engine.is_endless = True
    engine.is_ready = None if has_begun else asyncio.Event()
    sent: list[Any] = []
    counters = Counters()
    body = json.dumps({"messages": HELLO, "stream": stream}).encode()

    async def call_and_leave() -> None:
        has_left = asyncio.Event()
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message["type"])
            await asyncio.sleep(0.01)  # so that it leaves while a chunk is being sent, as most clients do

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        app = create_app(client.preparer, engine, MODEL, counters=counters)
        running = asyncio.ensure_future(app(scope, receive, send))
        while not engine.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        if stream and has_begun:
            await asyncio.to_thread(wait_until, lambda: sent)
        assert not running.done()
        assert bool(sent) == (stream and has_begun)
        has_left.set()
        await asyncio.wait_for(running, timeout=10)
        await asyncio.to_thread(wait_until, lambda: engine.num_abandoned)
        assert engine.num_abandoned == 1  # checked here, as closing the loop would cancel whatever still runs

    asyncio.run(call_and_leave())
    counted = {digit: counters.numbers()[slot] for digit, slot in RESPONSES.items()}
    assert counted == {2: int(stream and has_begun), 3: 0, 4: 0, 5: 0}


# Arbitrary bodies ---------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
texts = st.text(max_size=12) | st.sampled_from(
    ["<start_of_image>", "<image_soft_token>", "<bos>", "{{ 1/0 }}", "\ud800"]
)
urls = st.sampled_from(
    [
        draw(1).data_url,
        draw(1).data_url[:400],
        "data:,",
        "data:;base64,",
        "data:,%ff",
        "http://x/y.png",
        "file:///x",
        "",
    ]
)
parts = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, texts),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, urls),
    st.builds(lambda url: {"type": "image_url", "image_url": url}, urls | json_values),
    json_values,
)
roles = st.sampled_from(["user", "assistant", "system", "developer", "tool", ""])
messages = st.builds(
    lambda role, content: {"role": role, "content": content}, roles, texts | st.lists(parts, max_size=3)
)
FIELDS = """n stop seed logprobs top_logprobs max_tokens temperature top_p logit_bias stream stream_options min_tokens
cache_salt priority mm_processor_kwargs model tools user stop_token_ids messages ignore_eos
include_stop_str_in_output top_k min_p"""
field_names = st.sampled_from(FIELDS.split()) | st.text(max_size=5)
plain = st.booleans() | st.integers(1, 4) | st.floats(0.1, 1) | st.none() | st.sampled_from([["d"], " B", "."])
small = plain | st.integers(-2, 4) | st.dictionaries(st.just("1"), st.floats()) | json_values
user_turns = st.builds(lambda content: [{"role": "user", "content": content}], st.lists(parts, min_size=1, max_size=3))
plausible_bodies = st.builds(
    lambda content, fields: {"messages": [{"role": "user", "content": content}]} | fields,
    st.text(max_size=20) | st.just(HELLO[0]["content"]),
    st.dictionaries(
        st.sampled_from(["n", "logprobs", "stream", "stop", "temperature", "min_tokens", "top_p"]), plain, max_size=2
    ),
)
bodies = st.builds(
    lambda talk, fields: {"messages": talk} | fields,
    st.just(HELLO) | user_turns | st.lists(messages | json_values, max_size=3),
    st.dictionaries(field_names, small, max_size=2),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=plausible_bodies | bodies | json_values)
def test_no_body_makes_the_server_fail(client: Client, body: Any) -> None:
    response = client.send("POST", "/v1/chat/completions", content=json.dumps(body).encode())
    event(str(response.status_code))
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        error_of(response)


def test_a_request_s_body_is_released_before_its_answer_begins(client: Client, engine: FakeEngine) -> None:
    """Memory for the body is released early, as other requests may have bodies as large meanwhile."""
    num_begun = 0

    def nothing_is_held() -> bool:
        gc.collect()
        return not any(isinstance(each, LiftedUrl) for each in gc.get_objects())

    def expect_nothing_held() -> None:
        nonlocal num_begun
        # The thread that prepared the request may still be returning.
        wait_until(nothing_is_held)
        num_begun += 1

    engine.on_begun = expect_nothing_held
    picture = to_data_url(to_png(draw(1).picture) + bytes(MIN_BYTES))
    for stream in (False, True):
        url = {"type": "image_url", "image_url": {"url": picture}}
        response = client.chat(messages=[{"role": "user", "content": [url]}], stream=stream)
        assert response.status_code == 200
    assert num_begun == 2


def test_requests_that_compile_grammars_leave_threads_for_others(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller may send many grammars that compile for seconds; only two compile at a time."""
    may_end = threading.Event()
    monkeypatch.setattr(check_grammar, "_try_to_compile", lambda _: "" if may_end.wait(30) else "late")
    app = create_app(client.preparer, client.engine, MODEL)

    async def ask_all(http: httpx.AsyncClient, path: str, prompt: dict[str, Any]) -> None:
        bodies = [{**prompt, "guided_regex": f"{path}{number}"} for number in range(60)]
        slow = [asyncio.ensure_future(http.post(path, json=body)) for body in bodies]
        try:
            async with asyncio.timeout(20):
                await asyncio.sleep(0.2)
                assert (await http.post("/tokenize", json={"prompt": "Hello"})).status_code == 200
        finally:
            may_end.set()
        assert {response.status_code for response in await asyncio.gather(*slow)} == {200}
        may_end.clear()

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            await ask_all(http, "/v1/chat/completions", {"messages": HELLO})
            await ask_all(http, "/v1/completions", {"prompt": "Hello"})

    asyncio.run(run())


def test_a_finished_answer_is_freed_without_garbage_collection(client: Client, tmp_path: Path) -> None:
    """An answer refers to its request's prompt and pictures, so it must not wait for the garbage collector."""
    client.kept = KeptResponses(tmp_path, 2**20)
    gc.collect()
    gc.disable()
    try:
        client.chat()
        client.stream()
        client.chat(tools=[{"type": "function", "function": {"name": "f"}}])
        complete(client, "Hello")
        for streams in (False, True):
            assert client.send("POST", "/v1/responses", json={"input": "Hello", "stream": streams}).status_code == 200
        # The thread that prepared the last request may still be returning.
        wait_until(lambda: not any(isinstance(each, Answer) for each in gc.get_objects()))
    finally:
        gc.enable()
        client.kept.close()


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "answer_type"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 20}, ChatAnswer),
        ("/v1/completions", {"prompt": "Hello", "logprobs": 20}, CompletionAnswer),
        ("/v1/responses", {"input": "Hello", "include": [LOGPROBS], "top_logprobs": 20}, ResponsesAnswer),
    ],
)
def test_an_answer_with_many_log_probabilities_is_built_outside_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch, path: str, fields: Any, answer_type: Any, is_large: bool
) -> None:
    build, threads = answer_type._completion, list[threading.Thread]()

    def note_thread(answer: Any, choices: Any) -> Any:
        threads.append(threading.current_thread())
        return build(answer, choices)

    monkeypatch.setattr(answer_type, "_completion", note_thread)
    client.engine.token_ids = client.preparer.tokenizer.encode("Red. ") * (50 if is_large else 1)
    assert client.send("POST", path, json={"model": MODEL, **fields}).status_code == 200
    [thread] = threads
    assert (thread is not threading.main_thread()) == is_large, "which runs the event loop"
