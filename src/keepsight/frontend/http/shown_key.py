"""The API key that a request shows, whether it is known or not."""

from starlette.datastructures import Headers
from starlette.types import Scope

from keepsight.frontend.http.error_response import asks_anthropic

# The header in which Anthropic's clients may send their key.
MESSAGES_HEADER = "x-api-key"


def shown_key(scope: Scope) -> str:
    """Return the key; empty if there is none."""
    return key_in(Headers(scope=scope), MESSAGES_HEADER if asks_anthropic(scope) else None)


def key_in(headers: Headers, other_header: str | None = None) -> str:
    """Return the key as a bearer's token, or else in a header of its own, if it may be there."""
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not shown.strip():
        shown = "" if other_header is None else headers.get(other_header, "")
    return shown.strip()
