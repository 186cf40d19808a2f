"""Calls of tools that an answer made: as clients hear of them and send them back, and as chat templates want them."""

from typing import Any, Literal

import msgspec

from keepsight.frontend.http.decode_body import refusal_of


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str  # JSON, as the model wrote it, as far as it came


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class _SentFunction(CalledFunction, frozen=True, forbid_unknown_fields=True):
    parsed_arguments: Any = None


class _SentCall(ToolCall, frozen=True, forbid_unknown_fields=True):
    """As OpenAI's own client makes it of an answer that it parses or gathers: what is more says nothing new."""

    function: _SentFunction
    index: int | None = None

    def as_answered(self) -> dict[str, Any]:
        """Who puts a stream together may have heard of no arguments."""
        arguments = self.function.arguments if self.function.arguments.strip() else "{}"
        return {"id": self.id, "function": {"name": self.function.name, "arguments": arguments}, "type": self.type}


def read_tool_calls(value: object, field: str) -> list[dict[str, Any]]:
    """As they were sent back, their arguments word by word, be they JSON or not: an answer may have been cut off."""
    try:
        calls = msgspec.convert(value, list[_SentCall])
    except msgspec.ValidationError as error:
        raise refusal_of(error, _SentCall, field) from error
    return [call.as_answered() for call in calls]


def show_tool_calls(message: dict[str, Any]) -> dict[str, Any]:
    """With arguments that are objects, as templates want them: they would quote a text once more."""
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def parse_arguments(arguments: str) -> dict[str, Any] | None:
    """None: they were cut off, or are no object."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    # Nothing of what was cut off, as vLLM has it: many templates can write nothing else.
    return {**call, "function": {**function, "arguments": parse_arguments(function["arguments"]) or {}}}
