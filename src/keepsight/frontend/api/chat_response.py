"""The bodies that `/v1/chat/completions` and `/v1/models` answer with, in OpenAI's shapes.

Fields that are UNSET do not appear in the JSON, those that are None appear as null: OpenAI's clients tell them apart.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.frontend.prompt.read_tool_calls import ToolCall
from keepsight.observe.account import AccountBody
from keepsight.requests import FinishReason


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    image_tokens: int
    text_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def count(
        cls, num_prompt_tokens: int, num_completion_tokens: int, num_image_tokens: int, num_cached_tokens: int
    ) -> "Usage":
        details = PromptTokensDetails(
            cached_tokens=num_cached_tokens,
            image_tokens=num_image_tokens,
            text_tokens=num_prompt_tokens - num_image_tokens,
        )
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=details,
        )


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    # Of less than a character `token` cannot show them.
    byte_values: list[int] = msgspec.field(name="bytes")


class ContentLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ContentLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's: of a token of the prompt, or of one that was likelier in its place."""

    logprob: float
    rank: int
    decoded_token: str


# vLLM's: of each token, by ids.  Of the first nothing can be told.
ToldPrompt = list[dict[str, PromptLogprob] | None]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None  # null beside calls
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


# Or it ended with calls, whose results are waited for.
ChatFinishReason = Literal[FinishReason, "tool_calls"]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    finish_reason: ChatFinishReason
    logprobs: ChoiceLogprobs | None = None
    stop_reason: int | str | None = None  # vLLM's: which stop string or stop token it was
    token_ids: list[int] | UnsetType = UNSET


class Extras(msgspec.Struct, frozen=True):
    """`keepsight`: what was asked for beside OpenAI's answer."""

    # For each prompt.
    accounts: list[AccountBody]


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: ToldPrompt | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    keepsight: Extras | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a call has its id and its name, the others what its arguments go on with."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
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

    `prompt_token_ids` are told in the first.
    """

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    keepsight: Extras | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    # The name that answers call it by.  Tools of vLLM's read it; there it may be a path, which is nobody's business.
    root: str
    created: int
    owned_by: str = "keepsight"
    max_model_len: int
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


def show_bytes(token_bytes: bytes) -> str:
    """A token may be less than a character."""
    return token_bytes.decode(errors="replace")


def to_finite(logprob: float) -> float:
    """JSON has no -inf; OpenAI writes -9999.0 for a token that cannot come."""
    return max(logprob, -9999.0)
