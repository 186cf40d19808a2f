"""The response bodies of `/v1/chat/completions`, in OpenAI's format.

Fields that are UNSET are left out of the JSON, those that are None appear as null: OpenAI's clients distinguish them.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.frontend.api.response_parts import ContentLogprob, Extras, PromptLogprobs, Usage
from keepsight.frontend.prompt.read_tool_calls import ToolCall
from keepsight.requests import FinishReason


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ContentLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None  # null if there are only calls, or only a thought
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    # For a model that may think, under both names that clients read; null if it did not think.
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


# "tool_calls": the answer ended with calls, whose results are awaited.
ChatFinishReason = Literal[FinishReason, "tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason
    logprobs: ChoiceLogprobs | None = None
    stop_reason: int | str | None = None  # vLLM's field: the stop string or stop token that ended it
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    keepsight: Extras | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The first delta of a call has its id and name, the others continue its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """With `stream_options.include_usage`, `usage` is null in all chunks but the last, which has no choices.

    `prompt_token_ids` are in the first chunk.
    """

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    keepsight: Extras | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
