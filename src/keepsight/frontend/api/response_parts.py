"""What the answers of several endpoints hold, and the list of models, in OpenAI's shapes."""

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
    # Of what was thought before the answer, its tags included.
    reasoning_tokens: int = 0
    # Of an answer that its caller predicted: tokens that were guessed, and how many more were predicted.
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    # Of a model that may think, and of what was predicted.
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
    # Of less than a character `token` cannot show them.
    byte_values: list[int] = msgspec.field(name="bytes")


class ContentLogprob(TopLogprob, frozen=True, kw_only=True):
    """Of a token that was said, and of those that were likeliest in its place."""

    top_logprobs: list[TopLogprob]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's: of a token of the prompt, or of one that was likelier in its place."""

    logprob: float
    rank: int
    decoded_token: str


# vLLM's: of each token, by ids.  Of the first nothing can be told.
ToldPrompt = list[dict[str, PromptLogprob] | None]


class Extras(msgspec.Struct, frozen=True):
    """`keepsight`: what was asked for beside OpenAI's answer."""

    # For each prompt.
    accounts: list[AccountBody]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    # The name that answers call it by.  Tools of vLLM's read it; there it may be a path, which is nobody's business.
    root: str
    # Of an adapter: what it is laid over.
    parent: str | None = None
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
