"""The reason for which an OpenAI server refused a request or ended its answer, with advice where it is known."""

import json
from collections.abc import Mapping
from contextlib import suppress
from http.client import responses
from typing import Any

KEY_VARIABLE = "OPENAI_API_KEY"
# Raised for invalid JSON, or JSON that is nested too deeply.
UNREADABLE = (ValueError, RecursionError)
_UNKNOWN = "the server ended the answer with an error"


def read_refusal(status: int, body: bytes, url: str) -> str:
    """Return the status and the server's message. `url` is the one that was asked."""
    message = _message_in(body)
    advice = ""
    if status == 401:
        advice = f" (--api-key, or {KEY_VARIABLE} in the environment)"
    elif status == 404 and message in (None, "Not Found"):
        # The path is unknown; an unknown model has a message of its own.
        advice = f" (asked {url}; a server's URL usually ends with /v1)"
    message = message or _shown(body) or responses.get(status, "no reason given")
    return f"{status}: {message}{advice}"


def read_failure(body: bytes) -> str:
    """Return the message of an error, whatever its form."""
    return _message_in(body) or _shown(body) or _UNKNOWN


def failure_of(event: Mapping[str, Any]) -> str | None:
    """Return the message of an event that ends the answer with an error, in any server's form; None for others."""
    choices = event.get("choices")
    if failed := list(filter(_has_failed, choices if isinstance(choices, list) else ())):
        return _message_of(failed[0]) or _UNKNOWN
    if not (event.get("error") or event.get("object") == "error" or _is_bare_error(event)):
        return None
    return _message_of(event) or _shown(json.dumps(event).encode())


def failure_in(body: bytes | bytearray) -> str | None:
    """Return the message of an error that came in place of a stream; None if it is none."""
    with suppress(*UNREADABLE, AttributeError):
        return failure_of(json.loads(body))
    return None


def _has_failed(choice: object) -> bool:
    return isinstance(choice, dict) and choice.get("finish_reason") == "error"


def _is_bare_error(event: Mapping[str, Any]) -> bool:
    """Return whether it is an error without `error` around it. A message alone may be a sign of life."""
    is_named = bool(event.get("code")) or "error" in str(event.get("type")).lower()
    return "choices" not in event and bool(event.get("message")) and is_named


def _message_in(body: bytes) -> str | None:
    with suppress(*UNREADABLE):
        return _message_of(json.loads(body))
    return None


def _shown(body: bytes) -> str:
    return body[:200].decode(errors="replace").strip()


def _message_of(body: object) -> str | None:
    """Return the error's message, given in OpenAI's form, as plain text, or without `error` around it."""
    error = (body.get("error") or body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) else None
