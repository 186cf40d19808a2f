"""What a client is told about an error, and in which shape."""

import json

import pytest

from keepsight.errors import (
    AccessError,
    AnsweredError,
    EngineLostError,
    ForbiddenError,
    InvalidArgumentError,
    MediaBusyError,
    MediaStoreError,
    RequestFailedError,
    ServerOverloadedError,
)
from keepsight.frontend.http.error_response import MAX_ERROR_CHARACTERS, ErrorResponse, error_response


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (AccessError("a key is needed", "missing_api_key"), 401, "invalid_request_error", "missing_api_key"),
        (ForbiddenError("not you", "admin_only"), 403, "invalid_request_error", "admin_only"),
        (RequestFailedError("9 blocks of 5", is_refusal=True), 400, "invalid_request_error", "cannot_fit"),
        (EngineLostError("it ended"), 503, "server_error", "engine_lost"),
        (ServerOverloadedError("no room"), 503, "server_error", "server_overloaded"),
        (MediaBusyError("url", "no room"), 429, "invalid_request_error", "media_busy"),
        (MediaStoreError("media", "no room"), 507, "server_error", "media_store_unavailable"),
    ],
)
def test_client_errors_and_retryable_errors_are_explained(
    error: AnsweredError, status: int, kind: str, code: str
) -> None:
    response = error_response(error, {"path": "/v1/models", "headers": []})
    body = json.loads(bytes(response.body))["error"]
    assert (response.status_code, body["type"], body["code"]) == (status, kind, code)
    assert body["message"] == str(error)
    assert ("retry-after" in response.headers) == (status in (429, 503, 507))
    assert ("www-authenticate" in response.headers) == (status == 401)


def test_internal_errors_are_reported_without_details() -> None:
    response = error_response(
        RequestFailedError("the engine failed: KeyError"), {"path": "/v1/messages", "headers": []}
    )
    assert response.status_code == 500
    assert b"KeyError" not in response.body


def test_a_refusal_is_short_even_if_it_quotes_something_long() -> None:
    details = ErrorResponse.of(InvalidArgumentError("field" * 10_000, "is no field")).error
    assert details.param is not None
    assert len(details.message) == len(details.param) == MAX_ERROR_CHARACTERS
    assert details.message == details.param == ("field" * 10_000)[: MAX_ERROR_CHARACTERS - 3] + "..."


@pytest.mark.parametrize(
    ("path", "headers", "is_asked"),
    [
        ("/v1/messages", [], True),
        ("/keepsight/v1/messages/batches", [], True),
        ("/v1/models", [(b"anthropic-version", b"2023-06-01")], True),
        ("/v1/models", [], False),
        ("/v1/chat/completions", [], False),
    ],
)
def test_anthropics_api_is_known_by_its_paths_and_by_a_header(
    path: str, headers: list[tuple[bytes, bytes]], is_asked: bool
) -> None:
    response = error_response(InvalidArgumentError("field", "is no field"), {"path": path, "headers": headers})
    assert ("type" in json.loads(bytes(response.body))) == is_asked
