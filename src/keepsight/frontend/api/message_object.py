"""The answers of `/v1/messages`, in Anthropic's shapes: a message, its blocks, and the events of its stream."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.frontend.api.response_parts import Extras, Usage
from keepsight.frontend.http.error_response import MessagesError
from keepsight.frontend.prompt.read_tool_calls import parse_arguments

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
# The signature of thinking blocks. It is never checked here, but clients leave out blocks without one.
SIGNATURE = "unsigned"
NO_INPUT = msgspec.Raw(b"{}")


class TextAdded(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThoughtAdded(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputAdded(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class Signed(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


Added = TextAdded | ThoughtAdded | InputAdded | Signed


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str = ""

    def add(self, text: str) -> Added:
        return TextAdded(text)

    def fill(self, text: str) -> "TextBlock":
        return TextBlock(text=text)


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""

    def add(self, text: str) -> Added:
        return ThoughtAdded(text)

    def fill(self, text: str) -> "ThinkingBlock":
        return ThinkingBlock(thinking=text, signature=SIGNATURE)


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    # Verbatim, as the model wrote it.
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]

    def add(self, text: str) -> Added:
        return InputAdded(text)

    def fill(self, text: str) -> "ToolUseBlock":
        """Set the input; a call that was cut off keeps its empty one."""
        is_whole = parse_arguments(text) is not None
        return msgspec.structs.replace(self, input=msgspec.Raw(text.encode())) if is_whole else self


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` leaves out the prompt tokens found in the prefix cache, which are reported separately."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens: int
    # Only for a model that can think.
    output_tokens_details: ThinkingTokens | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        cached, thought = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=UNSET
            if isinstance(thought, UnsetType)
            else ThinkingTokens(thinking_tokens=thought.reasoning_tokens),
        )


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    keepsight: Extras | UnsetType = UNSET


class MessageTokens(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: Added


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage
    keepsight: Extras | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesError
