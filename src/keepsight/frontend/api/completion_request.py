"""The body of `POST /v1/completions`: prompts without a chat template, as texts, token ids or embeddings."""

from typing import Any, ClassVar

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.generation_fields import GenerationFields
from keepsight.frontend.api.listed_prompts import Prompt, is_prompt, name_prompts
from keepsight.frontend.http.decode_body import BodyDecoder, Buffer, NeutralValues, Refused

# Limit per request, counting each prompt's `n`: every choice is a sequence that the engine holds.
MAX_CHOICES = 256


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Exactly one of the two; clients that must send a prompt may send an empty one with embeddings.
    prompt: str | list[Any] | None = None
    prompt_embeds: str | list[Any] | None = None
    logprobs: int | None = None
    echo: bool | None = None

    suffix: Refused = None

    NEUTRAL_VALUES: ClassVar[NeutralValues] = {
        **GenerationFields.NEUTRAL_VALUES,
        "add_special_tokens": (True,),
        "suffix": ("",),
    }
    DEFAULT_MAX_TOKENS: ClassVar[int | None] = 16

    @property
    def prompts(self) -> dict[str, Prompt]:
        """The prompts, keyed by their names in the request, such as `prompt[1]`."""
        return name_prompts("prompt", self.prompt)

    @property
    def embedded_prompts(self) -> dict[str, object]:
        """The prompts given as embeddings instead, each the base64 of a file, keyed by their names in the request."""
        if isinstance(self.prompt_embeds, str):
            return {"prompt_embeds": self.prompt_embeds}
        return {f"prompt_embeds[{index}]": each for index, each in enumerate(self.prompt_embeds or ())}

    def check(self) -> None:
        super().check()
        if self.prompt_embeds is None:
            self._check_prompts()
        else:
            self._check_embedded_prompts()

    def choose_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompt_top_logprobs(self) -> list[int]:
        echoed = [self.logprobs] if self.echo and self.logprobs is not None else []
        return super().prompt_top_logprobs + echoed

    @property
    def wants_answer(self) -> bool:
        return not (self.echo and self.max_tokens == 0)

    def client_field_name(self, field: str) -> str:
        is_by_echo = field == "prompt_logprobs" and self.prompt_logprobs is None
        return "echo" if is_by_echo else super().client_field_name(field)

    def choose_max_tokens(self) -> int | None:
        # To report on a prompt, the engine samples a token, too.
        return self.max_tokens if self.wants_answer else 1

    def _check_prompts(self) -> None:
        if self.prompt is None:
            raise InvalidArgumentError("prompt", "is required, unless prompt_embeds is given")
        # Checked before looking at any prompt: there may be millions.
        self._check_num_choices("prompt", 1 if is_prompt(self.prompt) else len(self.prompt))
        for field, prompt in self.prompts.items():
            if not is_prompt(prompt):
                raise InvalidArgumentError(field, "must be a string, a list of token ids, or a list of either")

    def _check_embedded_prompts(self) -> None:
        if self.echo:
            raise InvalidArgumentError("echo", "repeats the prompt's text, but prompt_embeds have none")
        if self.prompt not in (None, ""):
            raise InvalidArgumentError(
                "prompt_embeds", "exactly one of prompt and prompt_embeds must be given, not both"
            )
        is_one = isinstance(self.prompt_embeds, str)
        self._check_num_choices("prompt_embeds", 1 if is_one else len(self.prompt_embeds or ()))
        for field, prompt in self.embedded_prompts.items():
            if not isinstance(prompt, str):
                raise InvalidArgumentError(field, "must be the base64 of a file, or a list of these")
            if not prompt:
                raise InvalidArgumentError(field, "is empty")

    def _check_num_choices(self, field: str, num_prompts: int) -> None:
        num_choices = num_prompts * (1 if self.n is None else self.n)
        if not num_prompts or num_choices > MAX_CHOICES:
            raise InvalidArgumentError(field, f"must ask for 1 to {MAX_CHOICES} answers in all, not {num_choices}")


_decoder = BodyDecoder(CompletionRequest)


def parse_completion_request(body: Buffer) -> CompletionRequest:
    request = _decoder.decode(body)
    request.check()
    return request
