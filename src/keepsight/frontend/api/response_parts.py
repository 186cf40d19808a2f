"""The parts of answers that several endpoints share, in OpenAI's shapes, and the list of models, in Anthropic's too."""

from datetime import datetime
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from keepsight.observe.account import AccountBody


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    image_tokens: int
    audio_tokens: int
    text_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    # Tokens of the thought before the answer, its tags included.
    reasoning_tokens: int = 0
    # If the caller predicted the answer: the tokens that were guessed, and how many more were predicted.
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # Only for a model that can think, or a predicted answer.
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def count(
        cls,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        num_image_tokens: int,
        num_cached_tokens: int,
        num_thought_tokens: int | None = None,
        num_audio_tokens: int = 0,
    ) -> "Usage":
        details = PromptTokensDetails(
            cached_tokens=num_cached_tokens,
            image_tokens=num_image_tokens,
            audio_tokens=num_audio_tokens,
            text_tokens=num_prompt_tokens - num_image_tokens - num_audio_tokens,
        )
        return cls(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=details,
            completion_tokens_details=UNSET
            if num_thought_tokens is None
            else CompletionTokensDetails(reasoning_tokens=num_thought_tokens),
        )


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    # `token` cannot show the bytes of an incomplete character.
    byte_values: list[int] = msgspec.field(name="bytes")


class ContentLogprob(TopLogprob, frozen=True, kw_only=True):
    """The log-probability of a generated token, and those of the most likely tokens in its place."""

    top_logprobs: list[TopLogprob]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probability of a token of the prompt, or of a more likely one in its place, in vLLM's shape."""

    logprob: float
    rank: int
    decoded_token: str


# vLLM's shape: for each token of the prompt, log-probabilities by token id; None for the first, which has none.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Extras(msgspec.Struct, frozen=True):
    """The field `keepsight`: requested additions to OpenAI's answer."""

    # One for each prompt.
    accounts: list[AccountBody]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    # The model name in answers. Tools for vLLM read this field; vLLM may show a path here, which is kept private.
    root: str
    # For an adapter: the model that it is based on.
    parent: str | None = None
    created: int
    owned_by: str = "keepsight"
    max_model_len: int
    object: Literal["model"] = "model"

    # Anthropic's.
    type: Literal["model"] = "model"
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"

    # Anthropic's: there is a single page.
    has_more: Literal[False] = False
    first_id: str
    last_id: str


def show_bytes(token_bytes: bytes) -> str:
    """Decode a token, which may be an incomplete character."""
    return token_bytes.decode(errors="replace")


def to_finite(logprob: float) -> float:
    """Replace -inf, which JSON lacks, by -9999.0, which OpenAI writes for an impossible token."""
    return max(logprob, -9999.0)
