"""The structs nested in a request of Anthropic's API, and their conversion to those of a chat request."""

from typing import Any, ClassVar, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.response_format import JsonSchema, ResponseFormat
from keepsight.frontend.api.tool_fields import Function, NamedTool, Tool, ToolChoice
from keepsight.frontend.http.decode_body import NeutralValues, Refused
from keepsight.frontend.prompt.read_messages import CacheControl


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # No effect: calls are always streamed as they are generated.
    eager_input_streaming: bool | None = None

    allowed_callers: Refused = None
    defer_loading: Refused = None
    input_examples: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    def as_in_chat(self) -> Tool:
        return Tool("function", Function(self.name, self.description, self.input_schema, self.strict))


class ChosenTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def as_in_chat(self) -> ToolChoice:
        if self.type == "tool":
            if self.name is None:
                raise InvalidArgumentError("tool_choice.name", "is required")
            return NamedTool(Function(self.name))
        if self.name is not None:
            raise InvalidArgumentError("tool_choice.name", "is of the type tool only")
        return "required" if self.type == "any" else self.type


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`disabled` turns thinking off. Otherwise the model thinks as it does by default, without a budget."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]

    def as_in_chat(self) -> ResponseFormat:
        return ResponseFormat(self.type, JsonSchema("answer", schema=self.schema))


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    # No effect: every model has a single effort level.
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessageMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A label, not used."""

    user_id: str | None = None
