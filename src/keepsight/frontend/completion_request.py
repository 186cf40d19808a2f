"""The body of `POST /v1/completions`: prompts without a chat template, as texts or as token ids."""

from collections.abc import Mapping
from typing import Any, ClassVar

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.decode_body import BodyDecoder, Buffer, Refused
from keepsight.frontend.generation_fields import NESTED_STRUCTS, GenerationFields

Prompt = str | list[int]
# Of one request, counting each prompt's `n`: every one is a sequence that the engine keeps.
MAX_CHOICES = 256


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: int | None = None

    prompt_embeds: Refused = None
    suffix: Refused = None

    NEUTRAL_VALUES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationFields.NEUTRAL_VALUES,
        "add_special_tokens": (True,),
        "suffix": ("",),
    }
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16

    @property
    def prompts(self) -> dict[str, Prompt]:
        """By what the caller calls each."""
        if isinstance(self.prompt, str) or _are_token_ids(self.prompt):
            return {"prompt": self.prompt}
        return {f"prompt[{index}]": each for index, each in enumerate(self.prompt)}

    def check(self) -> None:
        super().check()
        for field, prompt in self.prompts.items():
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and _are_token_ids(prompt)):
                raise InvalidArgumentError(field, "must be a text or a list of token ids, or a list of such")
            if not prompt:
                raise InvalidArgumentError(field, "is empty")
        num_choices = len(self.prompts) * (1 if self.n is None else self.n)
        if not self.prompts or num_choices > MAX_CHOICES:
            raise InvalidArgumentError("prompt", f"must ask for 1 to {MAX_CHOICES} answers in all, not {num_choices}")

    def choose_logprobs(self) -> int | None:
        return self.logprobs


def _are_token_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(each) is int for each in prompt)


_decoder = BodyDecoder(CompletionRequest, NESTED_STRUCTS)


def parse_completion_request(body: Buffer) -> CompletionRequest:
    request = _decoder.decode(body)
    request.check()
    return request
