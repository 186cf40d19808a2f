"""The response bodies of `/v1/completions`, in OpenAI's format."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.frontend.api.response_parts import Extras, PromptLogprobs, Usage
from keepsight.requests import FinishReason


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per token of the text; for a prompt's first token only `text_offset`, where it begins, is known."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | UnsetType | None = UNSET  # vLLM's field: the stop string or stop token that ended it
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    # In a stream, only in each choice's first chunk.
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, or a chunk of a stream: they have the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    keepsight: Extras | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"
