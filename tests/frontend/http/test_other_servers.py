import pytest

from keepsight.api_settings import ApiSettings
from keepsight.errors import UnsupportedFieldError
from keepsight.frontend.api.chat_request import ChatRequest
from keepsight.frontend.api.completion_request import CompletionRequest, parse_completion_request
from keepsight.frontend.api.openapi import describe_api
from keepsight.frontend.api.response_format import StructuredOutputs
from keepsight.frontend.api.tokenize_request import TokenizeRequest, parse_tokenize_request
from keepsight.frontend.http.decode_body import refused_fields
from keepsight.frontend.http.other_servers import FIELDS, PATHS, propose_path

SERVED_PATHS = tuple(describe_api(ApiSettings(), has_uploads=True, keeps_responses=True)["paths"])


@pytest.mark.parametrize("ours", FIELDS.values())
def test_every_suggested_field_is_supported(ours: str) -> None:
    name, _, inner = ours.partition(".")
    bodies = (ChatRequest, CompletionRequest, TokenizeRequest)
    assert any(name in body.__struct_fields__ and name not in refused_fields(body) for body in bodies)
    assert not inner or (inner in StructuredOutputs.__struct_fields__ and name == "structured_outputs")


def test_a_field_is_suggested_where_the_body_has_it() -> None:
    with pytest.raises(UnsupportedFieldError, match="did you mean 'max_tokens'"):
        parse_completion_request(b'{"prompt": "Hello", "max_completion_tokens": 4}')
    with pytest.raises(UnsupportedFieldError, match="did you mean 'prompt'"):
        parse_tokenize_request(b'{"content": "Hello"}')
    with pytest.raises(UnsupportedFieldError, match=r"of this API$"):
        parse_tokenize_request(b'{"n_predict": 4}')


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
