"""Errors as OpenAI's clients know them: status, body, and when to come again."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from keepsight.errors import AnsweredError
from keepsight.frontend.chat_response import ErrorResponse

# Seconds: about what an engine takes to be there again, and more than downloads and uploads take to make room.
RETRY_LATER = {"Retry-After": "2"}
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: RETRY_LATER, 503: RETRY_LATER, 507: RETRY_LATER}


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: AnsweredError) -> Response:
    return json_response(ErrorResponse.of(error), error.status, _HEADERS.get(error.status))
