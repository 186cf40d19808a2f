"""Calls of tools that an earlier answer made: as OpenAI's clients send them back, and as chat templates want them."""

from typing import Any, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.http.decode_body import AT_PATH


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


def read_tool_calls(value: object, field: str) -> list[dict[str, Any]]:
    """With arguments that are objects: a template would quote a text once more."""
    try:
        calls = msgspec.convert(value, list[ToolCall])
    except msgspec.ValidationError as error:
        placed = AT_PATH.fullmatch(str(error))
        path, message = (placed["path"], placed["message"]) if placed else ("", str(error))
        raise InvalidArgumentError(field + path, message) from error
    return [_as_shown(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _as_shown(call: ToolCall, field: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{field}.function.arguments", f"must be a JSON object in a text: {error}"
        ) from error
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
