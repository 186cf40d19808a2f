"""Errors in OpenAI's and Anthropic's shapes: status, body, and when to retry."""

from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from keepsight.errors import AnsweredError, InvalidArgumentError

# Seconds: about as long as an engine takes to restart, and longer than downloads and uploads take to make room.
RETRY_LATER = {"Retry-After": "2"}
# Limit on error messages: most quote what they refuse, which may be as long as a body.
MAX_ERROR_CHARACTERS = 2000
# In both Anthropic's and OpenAI's APIs.
FILES_PATH = "/v1/files"
# In Anthropic's API only.
MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY_LATER, 503: RETRY_LATER, 507: RETRY_LATER}


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail

    @classmethod
    def of(cls, error: Exception) -> "ErrorResponse":
        """Describe the caller's errors and those worth a retry; of all others tell only that the server failed."""
        if not isinstance(error, AnsweredError) or error.status == 500:
            return SERVER_FAILED
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        field = _shorten(error.field) if isinstance(error, InvalidArgumentError) else None
        return cls(error=ErrorDetail(message=_shorten(str(error)), type=kind, param=field, code=error.code))


MessagesErrorType = Literal[
    "api_error",
    "authentication_error",
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "permission_error",
    "rate_limit_error",
    "request_too_large",
]
_TYPES: Mapping[int, MessagesErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessagesFault(msgspec.Struct, frozen=True, kw_only=True):
    type: MessagesErrorType
    message: str


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: MessagesFault

    @classmethod
    def of(cls, error: Exception) -> "MessagesError":
        status = error.status if isinstance(error, AnsweredError) else 500
        return cls.saying(ErrorResponse.of(error), status)

    @classmethod
    def saying(cls, response: ErrorResponse, status: int) -> "MessagesError":
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return cls(MessagesFault(type=kind, message=response.error.message))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."


SERVER_FAILED = ErrorResponse(
    error=ErrorDetail(message="the server failed to answer; its log says why", type="server_error")
)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: AnsweredError, scope: Scope) -> Response:
    return fault_response(ErrorResponse.of(error), error.status, scope, _HEADERS.get(error.status))


def fault_response(
    error: ErrorResponse, status: int, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response in the shape of the API that was called."""
    return json_response(MessagesError.saying(error, status) if asks_anthropic(scope) else error, status, headers)


def asks_anthropic(scope: Scope) -> bool:
    """Return whether Anthropic's API is called: at a path below its own, or with the header that its clients send."""
    return MESSAGES_PATHS[0] in scope["path"] or "anthropic-version" in Headers(scope=scope)
