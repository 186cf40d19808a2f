"""Tool calls of an answer, in the form that clients receive and send back, and in the form that chat templates want."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from keepsight.frontend.http.decode_body import convert
from keepsight.frontend.prompt.arguments_as_parameters import show_values


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str  # JSON as the model wrote it; it may be cut off


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class _SentFunction(CalledFunction, frozen=True, forbid_unknown_fields=True):
    parsed_arguments: Any = None


class _SentCall(ToolCall, frozen=True, forbid_unknown_fields=True):
    """A call as OpenAI's own client sends it back after parsing or collecting an answer; added fields are redundant."""

    function: _SentFunction
    index: int | None = None

    def as_answered(self) -> dict[str, Any]:
        """Return the call as it was answered. A client that collected a stream may have received no arguments."""
        arguments = self.function.arguments if self.function.arguments.strip() else "{}"
        return {"id": self.id, "function": {"name": self.function.name, "arguments": arguments}, "type": self.type}


def read_tool_calls(value: object, field: str) -> list[dict[str, Any]]:
    """Return the calls sent back. Arguments stay verbatim, even if they are not JSON: an answer may be cut off."""
    return [call.as_answered() for call in convert(value, list[_SentCall], field)]


def show_tool_calls(message: dict[str, Any], as_texts: bool) -> dict[str, Any]:
    """Return the message with arguments as objects, as templates want them: they would quote a string once more.

    `as_texts`: the objects' values are texts, as the model wrote them.
    """
    read = show_values if as_texts else parse_arguments
    return {**message, "tool_calls": [_with_object(call, read) for call in message["tool_calls"]]}


def parse_arguments(arguments: str) -> dict[str, Any] | None:
    """Return the arguments; None if they were cut off or are not an object."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _with_object(call: dict[str, Any], read: Callable[[str], Mapping[str, Any] | None]) -> dict[str, Any]:
    function = call["function"]
    # Arguments that were cut off become an empty object, as in vLLM: many templates cannot write anything but objects.
    return {**call, "function": {**function, "arguments": read(function["arguments"]) or {}}}
