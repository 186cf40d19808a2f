"""Errors as OpenAI's clients know them: status, body, and when to come again."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from keepsight.errors import AnsweredError, InvalidArgumentError

# Seconds: about what an engine takes to be there again, and more than downloads and uploads take to make room.
RETRY_LATER = {"Retry-After": "2"}
# Most quote what they refuse, which may be as long as a body.
MAX_TOLD_CHARACTERS = 2000
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


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TOLD_CHARACTERS else text[: MAX_TOLD_CHARACTERS - 3] + "..."


SERVER_FAILED = ErrorResponse(
    error=ErrorDetail(message="the server failed to answer; its log says why", type="server_error")
)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: AnsweredError) -> Response:
    return json_response(ErrorResponse.of(error), error.status, _HEADERS.get(error.status))
