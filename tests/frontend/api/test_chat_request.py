import json
import math
from typing import Any

import httpx
import openai
import pytest

from keepsight.errors import InvalidArgumentError, UnsupportedFieldError
from keepsight.film_config import FILM_REQUEST_OPTIONS
from keepsight.frontend.api.chat_request import ChatRequest, MediaProcessorOptions, Prediction, parse_chat_request
from keepsight.frontend.http.decode_body import refused_fields
from keepsight.frontend.prompt.read_messages import read_messages
from keepsight.image_processor_config import REQUEST_OPTIONS
from keepsight.sampling_params import SamplingParams

OBFUSCATED = {"stream": True, "stream_options": {"include_obfuscation": True}}
MESSAGES = [{"role": "user", "content": "hi"}]


def parse(**fields: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"model": "demo", "messages": MESSAGES} | fields).encode())


def test_a_bare_request_samples_as_vllms_server_does_by_default() -> None:
    request = parse()
    assert request.to_sampling_params() == SamplingParams(max_tokens=None)
    assert (request.model, request.stream, request.includes_usage) == ("demo", None, False)
    assert read_messages(request.messages).messages == MESSAGES


def test_every_field_is_passed_on() -> None:
    request = parse(
        max_completion_tokens=7, temperature=0, top_p=0.5, n=2, stop="x", seed=3, logprobs=True, top_logprobs=4,
        logit_bias={"12": -1}, presence_penalty=1, frequency_penalty=-1, top_k=5, min_p=0.1, repetition_penalty=1.5,
        ignore_eos=True, stop_token_ids=[9], allowed_token_ids=[9, 8], bad_words=["no"], min_tokens=2,
        include_stop_str_in_output=True, skip_special_tokens=False,
        stream=True, stream_options={"include_usage": True}, mm_processor_kwargs={"do_pan_and_scan": True},
        cache_salt="tenant", priority=-2,
        user="me", metadata={"a": "b"}, prompt_cache_key="k", safety_identifier="s",
    )  # fmt: skip
    assert request.to_sampling_params() == SamplingParams(
        max_tokens=7, temperature=0, top_p=0.5, n=2, stop="x", seed=3, logprobs=4, logit_bias={12: -1},
        presence_penalty=1, frequency_penalty=-1, top_k=5, min_p=0.1, repetition_penalty=1.5, ignore_eos=True,
        stop_token_ids=[9], allowed_token_ids=[9, 8], bad_words=["no"], min_tokens=2,
        include_stop_str_in_output=True, skip_special_tokens=False,
    )  # fmt: skip
    assert request.stream
    assert request.includes_usage
    assert (request.cache_salt, request.priority) == ("tenant", -2)
    assert request.mm_processor_kwargs == MediaProcessorOptions(do_pan_and_scan=True)


@pytest.mark.parametrize(
    "content", ["a red circle", [{"type": "text", "text": "a red "}, {"type": "text", "text": "circle"}]]
)
def test_a_prediction_is_a_text_or_parts_of_one(content: object) -> None:
    request = parse(prediction={"type": "content", "content": content})
    assert request.to_sampling_params().prediction == "a red circle"
    # A prediction may be megabytes, so only the fact that there was one is kept.
    assert request.without_bulky_fields().prediction == Prediction("")


@pytest.mark.parametrize(
    ("prediction", "fault"),
    [
        ("text", "prediction: Expected `object"),
        ({"type": "words", "content": "text"}, r"prediction\.type: .*it may be 'content'"),
        ({"type": "content"}, r"prediction\.content: is required"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, r"prediction\.content\[0\]\.type: "),
        ({"type": "content", "content": "a", "text": "b"}, r"prediction\.text: is not a field"),
    ],
    ids=str,
)
def test_an_invalid_prediction_is_refused_by_its_path(prediction: object, fault: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{fault}"):
        parse(prediction=prediction)


def test_only_trusted_requests_choose_what_a_picture_costs() -> None:
    options = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 9, "resample": 3}
    asked = parse(mm_processor_kwargs=options).mm_processor_kwargs
    assert asked is not None
    assert asked.as_overrides(are_trusted=True) == options
    with pytest.raises(UnsupportedFieldError, match="--trust-request-mm-processor-kwargs") as caught:
        asked.as_overrides(are_trusted=False)
    assert caught.value.field == "mm_processor_kwargs.pan_and_scan_max_num_crops"
    assert MediaProcessorOptions(do_pan_and_scan=False).as_overrides(are_trusted=False) == {"do_pan_and_scan": False}
    sizes = {"min_pixels": 5, "max_pixels": 6, "size": {"shortest_edge": 7}}
    assert MediaProcessorOptions(**sizes).as_overrides(are_trusted=False) == sizes  # type: ignore[arg-type]
    frames = {"fps": 0.5, "min_frames": 2, "max_frames": 9}
    assert MediaProcessorOptions(**frames).as_overrides(are_trusted=False) == frames  # type: ignore[arg-type]
    assert {*MediaProcessorOptions.__struct_fields__} == REQUEST_OPTIONS | FILM_REQUEST_OPTIONS


def test_null_is_the_default_everywhere() -> None:
    names = [name for name in ChatRequest.__struct_fields__ if name not in ("model", "messages")]
    assert parse(**dict.fromkeys(names)) == parse()


def test_both_names_of_max_tokens_work_and_must_not_contradict() -> None:
    assert parse(max_tokens=5).to_sampling_params().max_tokens == 5
    assert parse(max_tokens=5, max_completion_tokens=5).to_sampling_params().max_tokens == 5
    for name in ("max_tokens", "max_completion_tokens"):
        assert parse(**{name: 2**63 - 1}).to_sampling_params().max_tokens == 2**31 - 1
    with pytest.raises(InvalidArgumentError, match="is 5, but max_completion_tokens, its new name, is 6"):
        parse(max_tokens=5, max_completion_tokens=6).to_sampling_params()


def test_logprobs_without_top_logprobs_are_of_the_sampled_token_alone() -> None:
    assert parse(logprobs=True).to_sampling_params().logprobs == 0
    assert parse(logprobs=False, top_logprobs=0).to_sampling_params().logprobs is None
    with pytest.raises(InvalidArgumentError, match="needs logprobs"):
        parse(top_logprobs=3).to_sampling_params()


def test_a_cache_key_has_at_most_its_length() -> None:
    assert parse(prompt_cache_key="k" * 1024).prompt_cache_key
    with pytest.raises(InvalidArgumentError, match="prompt_cache_key: must have at most 1024"):
        parse(prompt_cache_key="k" * 1025)


def test_the_defaults_of_vllm_s_requests_change_nothing() -> None:
    """All defaults that a `ChatCompletionRequest` of vLLM 0.32 dumps, except those that only other endpoints read."""
    switches = ("logprobs", "stream", "use_beam_search", "include_stop_str_in_output", "ignore_eos", "echo")
    off = dict.fromkeys((*switches, "continue_final_message", "add_special_tokens"), False)
    on = dict.fromkeys(
        ("include_reasoning", "parallel_tool_calls", "skip_special_tokens", "add_generation_prompt"), True
    )
    numbers = {"top_logprobs": 0, "n": 1, "length_penalty": 1.0, "min_tokens": 0, "priority": 0}
    lists: dict[str, Any] = {"stop": [], "stop_token_ids": [], "bad_words": []}
    later = ("kv_transfer_params", "logprob_token_ids", "repetition_detection", "session_id", "stream_interval")
    more = ("thinking_token_budget", "truncation_side", "vllm_xargs", "watermarking", "media_io_kwargs")
    nulls = dict.fromkeys((*later, *more, "return_prompt_text"))
    fields = {**off, **on, **numbers, **lists, **nulls, "tool_choice": "none", "spaces_between_special_tokens": True}
    assert parse(**fields).to_sampling_params() == parse().to_sampling_params()
    for name in (*later, *more):
        with pytest.raises(UnsupportedFieldError, match=f"{name}: is not supported by this server"):
            parse(**{name: {"a": 7}})


@pytest.mark.parametrize(("name", "values"), ChatRequest.NEUTRAL_VALUES.items())
def test_an_unsupported_field_is_accepted_with_a_value_that_changes_nothing(name: str, values: list[Any]) -> None:
    for value in values:
        assert parse(**{name: value}).to_sampling_params() == parse().to_sampling_params()


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"service_tier": "flex"}, 'service_tier: {} except for "auto" or "default", which has no effect'),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties: {} except for false, which has no effect",
        ),
        ({"web_search_options": {}}, "web_search_options: {}"),
        ({"request_id": "mine"}, "request_id: {}; the header X-Request-Id does the same"),
        ({"cache_prompt": False}, "cache_prompt: {} except for true, which has no effect"),
    ],
)
def test_a_refusal_says_which_values_are_accepted(fields: dict[str, Any], accepted: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        parse(**fields)
    assert str(caught.value) == accepted.format("is not supported by this server")


@pytest.mark.parametrize("name", refused_fields(ChatRequest))
def test_an_unsupported_field_is_refused_by_name(name: str) -> None:
    for value in ({"type": "json_object"}, "something", 17):
        with pytest.raises(UnsupportedFieldError, match="is not supported") as caught:
            parse(**{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"x" * 500: 1}, "x" * 77 + "...", "not a field"),
        ({"n_predict": 8}, "n_predict", "did you mean 'max_tokens'"),
        ({"max_new_tokens": 8}, "max_new_tokens", "did you mean 'max_tokens'"),
        ({"json_schema": {}}, "json_schema", "did you mean 'response_format'"),
        ({"regex": "a+"}, "regex", "did you mean 'structured_outputs.regex'"),
        ({"response_format": {"regex": "a+"}}, "response_format.regex", "of this API$"),
        ({"stream": True, "stream_options": {"include_use": 1}}, "stream_options.include_use", "include_usage"),
        ({"mm_processor_kwargs": {"do_resize": 1}}, "mm_processor_kwargs.do_resize", "not a field"),
        (OBFUSCATED, "stream_options.include_obfuscation", "not supported"),
    ],
)  # fmt: skip
def test_an_unknown_field_is_refused_with_its_path(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=message) as caught:
        parse(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["regex", "structural_tag", 5])
def test_a_wrong_keyword_is_refused_with_those_that_are_accepted(kind: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"may be 'text' or 'json_object' or 'json_schema'$") as caught:
        parse(response_format={"type": kind})
    assert caught.value.field == "response_format.type"


@pytest.mark.parametrize("tool", [{"tool": 1}, {"function": {"name": "look", "stopp": 1}}])
def test_only_fields_of_the_same_place_are_suggested(tool: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError, match=r"tools\[0\].* is not a field of this API$"):
        parse(tools=[{"type": "function", "function": {"name": "look"}} | tool])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": math.nan}, "body"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"n": 0}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"top_p": 0}, "top_p"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias['a']"),
        ({"logit_bias": {"1": 101}}, "logit_bias['1']"),
        ({"logit_bias": {"1": 1, "2": None}}, "logit_bias['2']"),
        ({"metadata": {"run": "a", "step": 7}}, "metadata['step']"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"mm_processor_kwargs": {"do_pan_and_scan": "yes"}}, "mm_processor_kwargs.do_pan_and_scan"),
        ({"model": 1}, "model"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse(**fields).to_sampling_params()
    assert caught.value.field == field


def test_tools_are_shown_as_they_were_sent_unless_tool_choice_is_none() -> None:
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "bare"}}]
    assert parse(tools=tools).shown_tools == parse(tools=tools, tool_choice="auto").shown_tools == tools
    assert parse(tools=tools, tool_choice="none").shown_tools == parse(tools=[]).shown_tools == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"\xff", "body"),
        (b'{"messages": "\xff"}', "body"),
        (b'{"messages": ' + b"[" * 100_000, "body"),
        (b"{}", "messages"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_chat_request(body)
    assert caught.value.field == field


def test_the_official_client_s_requests_are_understood() -> None:
    sent: list[bytes] = []

    def note(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        return httpx.Response(500)

    http_client: Any = httpx.Client(transport=httpx.MockTransport(note))
    client = openai.OpenAI(base_url="http://test/v1", api_key="x", http_client=http_client, max_retries=0)
    create: Any = client.chat.completions.create
    options = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "extra_body": {"top_k": 4}}
    with pytest.raises(openai.InternalServerError):
        create(model="demo", messages=MESSAGES, **options)
    params = parse_chat_request(sent[0]).to_sampling_params()
    assert (params.max_tokens, params.top_k) == (3, 4)
