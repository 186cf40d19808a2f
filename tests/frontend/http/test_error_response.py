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
from keepsight.frontend.http.error_response import MAX_TOLD_CHARACTERS, ErrorResponse, error_response


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
def test_what_is_the_caller_s_fault_or_worth_trying_again_is_told(
    error: AnsweredError, status: int, kind: str, code: str
) -> None:
    response = error_response(error, {"path": "/v1/models"})
    told = json.loads(bytes(response.body))["error"]
    assert (response.status_code, told["type"], told["code"]) == (status, kind, code)
    assert told["message"] == str(error)
    assert ("retry-after" in response.headers) == (status in (429, 503, 507))
    assert ("www-authenticate" in response.headers) == (status == 401)


def test_of_our_own_faults_no_more_is_told_than_that_they_are_ours() -> None:
    response = error_response(RequestFailedError("the engine failed: KeyError"), {"path": "/v1/messages"})
    assert response.status_code == 500
    assert b"KeyError" not in response.body


def test_a_refusal_is_short_however_long_what_it_names() -> None:
    told = ErrorResponse.of(InvalidArgumentError("field" * 10_000, "is no field")).error
    assert told.param is not None
    assert len(told.message) == len(told.param) == MAX_TOLD_CHARACTERS
    assert told.message == told.param == ("field" * 10_000)[: MAX_TOLD_CHARACTERS - 3] + "..."
