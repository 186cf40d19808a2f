import json
from collections.abc import Callable
from typing import Any

import pytest

from keepsight.api_settings import ApiSettings
from keepsight.errors import UnsupportedFieldError
from keepsight.frontend.api.chat_request import ChatRequest, MediaProcessorOptions, parse_chat_request
from keepsight.frontend.api.completion_request import CompletionRequest, parse_completion_request
from keepsight.frontend.api.embeddings_request import parse_embeddings_request
from keepsight.frontend.api.messages_fields import CustomTool
from keepsight.frontend.api.messages_request import MessagesRequest
from keepsight.frontend.api.openapi import describe_api
from keepsight.frontend.api.response_format import StructuredOutputs
from keepsight.frontend.api.responses_fields import Reasoning
from keepsight.frontend.api.responses_request import ResponsesRequest, parse_responses_request
from keepsight.frontend.api.tokenize_request import TokenizeRequest, parse_tokenize_request
from keepsight.frontend.api.tool_fields import Function, Tool
from keepsight.frontend.http.decode_body import refused_fields
from keepsight.frontend.http.other_servers import FIELDS, PATHS, propose_path

SERVED_PATHS = tuple(describe_api(ApiSettings(), has_uploads=True, keeps_responses=True)["paths"])
BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, ResponsesRequest, MessagesRequest, Tool, CustomTool)
SUGGESTED = {each for ours in FIELDS.values() for each in ((ours,) if isinstance(ours, str) else ours)}
WITHIN = {
    "function": Function,
    "mm_processor_kwargs": MediaProcessorOptions,
    "reasoning": Reasoning,
    "structured_outputs": StructuredOutputs,
}


@pytest.mark.parametrize("ours", sorted(SUGGESTED))
def test_every_suggested_field_is_supported(ours: str) -> None:
    name, _, inner = ours.partition(".")
    assert any(name in body.__struct_fields__ and name not in refused_fields(body) for body in BODIES)
    # Which variables a chat template has depends on the model.
    assert not inner or name == "chat_template_kwargs" or inner in WITHIN[name].__struct_fields__


@pytest.mark.parametrize(
    ("parse", "body", "message"),
    [
        (parse_completion_request, b'{"prompt": "Hello", "max_completion_tokens": 4}', "did you mean 'max_tokens'"),
        (parse_tokenize_request, b'{"content": "Hello"}', "did you mean 'prompt'"),
        (parse_tokenize_request, b'{"n_predict": 4}', r"of this API$"),
        (parse_responses_request, b'{"input": "Hello", "max_new_tokens": 4}', "did you mean 'max_output_tokens'"),
        (parse_responses_request, b'{"messages": []}', "did you mean 'input'"),
        (
            parse_responses_request,
            b'{"input": "Hello", "reasoning_effort": "none"}',
            r"did you mean 'reasoning\.effort'",
        ),
        (parse_chat_request, b'{"input": "Hello"}', "did you mean 'messages'"),
        (parse_tokenize_request, b'{"input": "Hello"}', "did you mean 'prompt'"),
        (parse_embeddings_request, b'{"prompt": "Hello"}', "did you mean 'input'"),
        (parse_completion_request, b'{"messages": []}', "did you mean 'prompt'"),
        (parse_completion_request, b'{"prompt": "Hello", "n_probs": 4}', "did you mean 'logprobs'"),
    ],
)
def test_a_field_is_suggested_where_the_body_has_it(
    parse: Callable[[bytes], object], body: bytes, message: str
) -> None:
    with pytest.raises(UnsupportedFieldError, match=message):
        parse(body)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"enable_thinking": False}, "did you mean 'chat_template_kwargs.enable_thinking'"),
        ({"fps": 2}, "did you mean 'mm_processor_kwargs.fps'"),
        ({"tools": [{"type": "function", "name": "look"}]}, r"tools\[0\].name: .* did you mean 'function.name'"),
        ({"extra_body": {"top_k": 1}}, "what it contains belongs in the body itself$"),
        ({"timings_per_token": True}, r"of this API$"),
        ({"images": []}, r"of this API$"),
        ({"template": "x"}, r"of this API$"),
        (
            {"separate_reasoning": False},
            "except for true, .*; a completion, whose text includes the thought, does the same",
        ),
        ({"guided_decoding_disable_fallback": True}, r"of this API$"),
    ],
)
def test_a_field_in_the_wrong_place_suggests_its_place_and_others_nothing(field: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=message):
        parse_chat_request(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **field}).encode())


@pytest.mark.parametrize(
    ("part", "field", "ours"),
    [
        ({"type": "image", "image": "media://a", "max_pixels": 9}, "max_pixels", "max_pixels"),
        ({"type": "image_url", "image_url": {"url": "x", "resized_width": 9}}, "image_url.resized_width", "max_pixels"),
        ({"type": "video", "video": "media://a", "nframes": 9}, "nframes", "num_frames"),
    ],
)
def test_a_size_within_a_part_suggests_the_request_s_field(part: dict[str, Any], field: str, ours: str) -> None:
    with pytest.raises(UnsupportedFieldError, match=f"'mm_processor_kwargs.{ours}' of the whole request") as caught:
        parse_chat_request(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
    assert caught.value.field == f"messages[0].content[0].{field}"


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/chat/completions", "/v1/chat/completions"),  # a base_url without /v1
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/healthz", "/health"),
        ("/v1/batches", None),
        ("/v1/rerank", None),
        ("/", None),
        *PATHS.items(),
    ],
)
def test_a_path_of_another_server_suggests_the_equivalent_one(path: str, ours: str | None) -> None:
    assert propose_path(path, SERVED_PATHS) == ours


def test_every_suggested_path_is_served() -> None:
    assert propose_path("/embed", [path for path in SERVED_PATHS if "embeddings" not in path]) is None
