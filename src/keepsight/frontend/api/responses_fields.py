"""The structs nested in a request of the Responses API, and their conversion to those of a chat request."""

from typing import Any, ClassVar, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.response_format import JsonSchema, ResponseFormat
from keepsight.frontend.api.tool_fields import AllowedTools, Function, NamedTool, Tool, ToolsChoice
from keepsight.frontend.http.decode_body import NeutralValues, Refused
from keepsight.frontend.prompt.reasoning_effort import Effort

Includable = Literal[
    "message.output_text.logprobs",
    # Answers of this server never contain these.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class FunctionTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    allowed_callers: Refused = None
    async_: Refused = msgspec.field(default=None, name="async")
    defer_loading: Refused = None
    output_schema: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
    }

    def as_in_chat(self) -> Tool:
        return Tool(self.type, Function(self.name, self.description, self.parameters, self.strict))


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str

    def as_in_chat(self) -> NamedTool:
        return NamedTool(Function(self.name))


class AllowedFunctions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction]

    def as_in_chat(self) -> ToolsChoice:
        return ToolsChoice(AllowedTools(self.mode, [each.as_in_chat() for each in self.tools]))


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def as_in_chat(self) -> ResponseFormat:
        if self.type != "json_schema":
            return ResponseFormat(self.type)
        if self.name is None:
            raise InvalidArgumentError("text.format.name", "is required")
        if self.schema is None:
            raise InvalidArgumentError("text.format.schema", "is required")
        return ResponseFormat(self.type, JsonSchema(self.name, self.description, self.schema, self.strict))


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None

    verbosity: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {"verbosity": ("medium",)}


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thoughts are returned whole and never summarized, so the options for summaries have no effect."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: Refused = None
    include_usage: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        "include_obfuscation": (False,),
        "include_usage": (True,),  # it is told in any case
    }
