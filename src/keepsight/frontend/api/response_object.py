"""The answers of `/v1/responses`, in OpenAI's shapes: a response, its items, and the events of its stream."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.frontend.api.response_parts import (
    CompletionTokensDetails,
    ContentLogprob,
    Extras,
    PromptTokensDetails,
    Usage,
)
from keepsight.frontend.api.responses_request import Echo

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    logprobs: list[ContentLogprob] = []
    annotations: list[Any] = []


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputThought(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The whole thought; it is never summarized."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = []


OutputItem = OutputThought | OutputMessage | OutputCall


class InputTokensDetails(PromptTokensDetails, frozen=True, kw_only=True):
    # Those that were charged for being written to a cache. OpenAI's client requires the field, in responses only.
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        thought = usage.completion_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(**msgspec.structs.asdict(usage.prompt_tokens_details)),
            output_tokens=usage.completion_tokens,
            # Set even for a model that does not think.
            output_tokens_details=CompletionTokensDetails(reasoning_tokens=0) if thought is UNSET else thought,
            total_tokens=usage.total_tokens,
        )


class ResponseFault(msgspec.Struct, frozen=True, kw_only=True):
    code: Literal["invalid_prompt", "server_error"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens"]


class Response(Echo, frozen=True, kw_only=True):
    id: str
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    # True if the response can be retrieved by its id.
    store: bool
    # The values used for this answer.
    temperature: float
    top_p: float
    keepsight: Extras | UnsetType = UNSET
    # OpenAI's fields that are the same in all responses.
    background: bool = False
    service_tier: Literal["default"] = "default"
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    # Position in the stream, from 0; set when the event is written.
    sequence_number: int = 0


class ResponseEvent(Event, frozen=True, kw_only=True):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class ItemEvent(Event, frozen=True, kw_only=True):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _WithinItem(Event, frozen=True, kw_only=True):
    output_index: int
    item_id: str


class _WithinPart(_WithinItem, frozen=True, kw_only=True):
    content_index: int = 0


class PartEvent(_WithinPart, frozen=True, kw_only=True):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class ThoughtDelta(_WithinPart, frozen=True, kw_only=True):
    delta: str
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"


class ThoughtDone(_WithinPart, frozen=True, kw_only=True):
    text: str
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"


class TextDelta(_WithinPart, frozen=True, kw_only=True):
    delta: str
    logprobs: list[ContentLogprob]
    type: Literal["response.output_text.delta"] = "response.output_text.delta"


class TextDone(_WithinPart, frozen=True, kw_only=True):
    text: str
    logprobs: list[ContentLogprob]
    type: Literal["response.output_text.done"] = "response.output_text.done"


class ArgumentsDelta(_WithinItem, frozen=True, kw_only=True):
    delta: str
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"


class ArgumentsDone(_WithinItem, frozen=True, kw_only=True):
    name: str
    arguments: str
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"


StreamedEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | ThoughtDelta
    | ThoughtDone
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
)
