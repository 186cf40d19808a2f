"""Errors as OpenAI's clients know them, and Anthropic's: status, body, and when to come again."""

from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from keepsight.errors import AnsweredError, InvalidArgumentError

# Seconds: about what an engine takes to be there again, and more than downloads and uploads take to make room.
RETRY_LATER = {"Retry-After": "2"}
# Most quote what they refuse, which may be as long as a body.
MAX_TOLD_CHARACTERS = 2000
# Of Anthropic's and OpenAI's APIs.
FILES_PATH = "/v1/files"
# Of Anthropic's.
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
        """What is the caller's own fault is told, and what is worth trying again; else no more than that it is ours."""
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
    def saying(cls, told: ErrorResponse, status: int) -> "MessagesError":
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return cls(MessagesFault(type=kind, message=told.error.message))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TOLD_CHARACTERS else text[: MAX_TOLD_CHARACTERS - 3] + "..."


SERVER_FAILED = ErrorResponse(
    error=ErrorDetail(message="the server failed to answer; its log says why", type="server_error")
)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: AnsweredError, scope: Scope) -> Response:
    return fault_response(ErrorResponse.of(error), error.status, scope, _HEADERS.get(error.status))


def fault_response(
    told: ErrorResponse, status: int, scope: Scope, headers: Mapping[str, str] | None = None
) -> Response:
    """In the shape of the API that was asked."""
    return json_response(MessagesError.saying(told, status) if asks_anthropic(scope) else told, status, headers)


def asks_anthropic(scope: Scope) -> bool:
    """Whether its API is asked: at a path of its own, or at one that is OpenAI's too, by a header of its clients."""
    path: str = scope["path"]
    return path.endswith(MESSAGES_PATHS) or (FILES_PATH in path and "anthropic-version" in Headers(scope=scope))
