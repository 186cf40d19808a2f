"""Errors as OpenAI's clients know them: status, body, and when to come again."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from keepsight.errors import (
    AccessError,
    EngineLostError,
    InvalidArgumentError,
    RequestFailedError,
    ServerOverloadedError,
)
from keepsight.frontend.chat_response import ErrorResponse

AnsweredError = InvalidArgumentError | RequestFailedError | AccessError | ServerOverloadedError
# Seconds: about what an engine takes to be there again.
RETRY_LATER = {"Retry-After": "2"}


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: AnsweredError) -> Response:
    headers = None
    if isinstance(error, EngineLostError | ServerOverloadedError):
        headers = RETRY_LATER
    elif isinstance(error, AccessError) and error.status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return json_response(ErrorResponse.of(error), error.status, headers)
