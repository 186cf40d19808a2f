"""The lines of a batch in OpenAI's format: requests as they are read, and what is written for each. Asks nobody."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
# Each line that is written begins so.
LINE_START = b'{"id":"batch_req_'
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


@dataclass(frozen=True, slots=True)
class Request:
    number: int
    custom_id: str
    url: str
    body: bytes


class _Fields(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    # Sent as it is.
    body: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    stream: Any = None


def read_requests(file: BinaryIO, max_bytes: int) -> Iterator[Request | bytes]:
    """Yield each line's request, or the output line that says what is wrong with it. Empty lines are left out.

    Holds one line at a time, of at most `max_bytes`.
    """
    seen: set[str] = set()
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            while line and not line.endswith(b"\n"):
                line = file.readline(2**20)
            yield error_line(number, None, "line_too_long", f"is longer than {max_bytes} bytes")
        elif line.strip():
            yield _read(number, line, seen)


def _read(number: int, line: bytes, seen: set[str]) -> Request | bytes:
    try:
        fields = msgspec.json.decode(line, type=_Fields)
    except _UNREADABLE as error:
        return error_line(number, None, "invalid_json_line", f"is not a JSON object: {error}")
    if (fault := _find_fault(fields, seen)) is not None:
        return error_line(number, fields.custom_id if isinstance(fields.custom_id, str) else None, *fault)
    seen.add(fields.custom_id)
    return Request(number, fields.custom_id, fields.url, bytes(fields.body))


def _find_fault(fields: _Fields, seen: set[str]) -> tuple[str, str] | None:
    """Return the code and the reason of a line that cannot be sent."""
    if not isinstance(fields.custom_id, str) or not fields.custom_id:
        return "invalid_request", "custom_id must be a text that is not empty"
    if fields.custom_id in seen:
        return "duplicate_custom_id", f"custom_id {fields.custom_id!r:.80} is that of an earlier line"
    if fields.method != "POST":
        return "invalid_method", f"method must be 'POST', not {fields.method!r:.80}"
    if fields.url not in URLS:
        return "invalid_url", f"url must be one of {', '.join(URLS)}, not {fields.url!r:.80}"
    try:
        body = msgspec.json.decode(fields.body, type=_Body)
    except _UNREADABLE:
        return "invalid_request", "body must be a JSON object"
    return ("invalid_request", "body.stream must not be true: a line takes a whole answer") if body.stream else None


def answer_line(custom_id: str, status: int, request_id: str | None, body: bytes) -> bytes:
    """Return the line of an answer, whatever its status."""
    try:
        content = json.loads(body, parse_constant=lambda _: None)  # NaN and infinities, which JSON lacks
    except (ValueError, RecursionError):  # a proxy's page
        content = {"error": {"message": body[:200].decode(errors="replace")}}
    return _to_line(custom_id, {"status_code": status, "request_id": request_id, "body": content}, None)


def error_line(number: int, custom_id: str | None, code: str, reason: str) -> bytes:
    """Return the line of a request that has no answer."""
    return _to_line(custom_id, None, {"code": code, "message": f"line {number}: {reason}", "line": number})


def _to_line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    """Characters that are not ASCII's are escaped: some are line breaks to many readers."""
    line_id = f"batch_req_{os.urandom(16).hex()}"
    line = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
