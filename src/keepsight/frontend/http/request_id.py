"""The id of a request: the client's, if it is a sane one. It is in the answer, and in the log."""

import os
import re

from starlette.types import Scope

from keepsight.frontend.http.error_response import asks_anthropic

# The second is the name that Anthropic's clients read in an answer.
HEADERS = ("x-request-id", "request-id")
_RAW_HEADER = HEADERS[0].encode()
_SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


def choose_request_id(scope: Scope) -> str:
    client_id = next((value for name, value in scope["headers"] if name == _RAW_HEADER), b"").decode("latin-1")
    return client_id if _SANE_ID.fullmatch(client_id) else os.urandom(16).hex()


def id_headers(scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of the answer."""
    names = HEADERS if asks_anthropic(scope) else HEADERS[:1]
    return [(name.encode(), request_id.encode()) for name in names]
