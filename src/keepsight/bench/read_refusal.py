"""The reason for which an OpenAI server refused a request, from the response's body, with advice where it is known."""

import json
from http.client import responses

KEY_VARIABLE = "OPENAI_API_KEY"
# Raised for invalid JSON, or JSON that is nested too deeply.
UNREADABLE = (ValueError, RecursionError)


def read_refusal(status: int, body: bytes, url: str) -> str:
    """Return the status and the server's message. `url` is the one that was asked."""
    try:
        message = message_of(json.loads(body))
    except UNREADABLE:
        message = None
    advice = ""
    if status == 401:
        advice = f" (--api-key, or {KEY_VARIABLE} in the environment)"
    elif status == 404 and message in (None, "Not Found"):
        # The path is unknown; an unknown model has a message of its own.
        advice = f" (asked {url}; a server's URL usually ends with /v1)"
    message = message or body[:200].decode(errors="replace").strip() or responses.get(status, "no reason given")
    return f"{status}: {message}{advice}"


def message_of(body: object) -> str | None:
    """Return the error's message, given in OpenAI's form, as plain text, or without `error` around it."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) else None
