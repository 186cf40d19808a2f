"""Calls of tools that an answer made: as clients hear of them and send them back, and as chat templates want them."""

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
    """As they were sent back, their arguments word by word."""
    try:
        calls = msgspec.convert(value, list[ToolCall])
    except msgspec.ValidationError as error:
        placed = AT_PATH.fullmatch(str(error))
        path, message = (placed["path"], placed["message"]) if placed else ("", str(error))
        raise InvalidArgumentError(field + path, message) from error
    for index, call in enumerate(calls):
        _check_arguments(call.function.arguments, f"{field}[{index}].function.arguments")
    return [msgspec.to_builtins(call) for call in calls]


def show_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """With arguments that are objects, as templates want them: they would quote a text once more."""
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _check_arguments(arguments: str, field: str) -> None:
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidArgumentError(field, f"must be a JSON object in a text: {error}") from error


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": msgspec.json.decode(function["arguments"])}}
