"""Rejects prompts that are too long and tokens that do not exist; errors give the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepsight.errors import InvalidArgumentError, PromptTooLongError, ReservedTokenError
from keepsight.frontend.prompt.expand_prompt import ExpandedPrompt
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.media import KINDS, SEVERAL, Kind, PictureLayout
from keepsight.sampling_params import SamplingParams

# How errors name the media parts of a prompt.
_PARTS: Mapping[Kind, str] = {**SEVERAL, "video": "moments of videos"}


class PromptLimits:
    def __init__(self, tokenizer: Tokenizer, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer, self.max_model_len, self.vocab_size = tokenizer, max_model_len, vocab_size

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def check_is_token(self, token_id: int, place: str) -> None:
        if not self.has_token(token_id):
            raise InvalidArgumentError(place, f"{token_id} is not one of this model's {self.vocab_size} tokens")

    def check_named_tokens(self, params: SamplingParams) -> None:
        for name in ("allowed_token_ids", "stop_token_ids"):
            token_ids = getattr(params, name) or ()
            if len(token_ids) > self.vocab_size:
                raise InvalidArgumentError(name, f"must hold at most this model's {self.vocab_size} tokens, each once")
            for index, token_id in enumerate(token_ids):
                self.check_is_token(token_id, f"{name}[{index}]")
        for token_id in params.logit_bias or ():
            self.check_is_token(token_id, f"logit_bias[{token_id}]")


@dataclass(frozen=True, slots=True)
class PromptRoom:
    """The room that one prompt has."""

    limits: PromptLimits
    # The caller's name for the prompt.
    field: str
    # None: it is to be answered, and must fit into the context. Otherwise only its tokens are told, up to so many.
    max_counted_tokens: int | None = None

    def check_pictures(self, layouts: Sequence[PictureLayout]) -> None:
        """Check the number of media tokens, before any crops and tokens are laid out."""
        num_media_tokens = sum(layout.num_tokens for layout in layouts)
        if num_media_tokens > self._longest:
            raise self._too_long(f"has {num_media_tokens} tokens of {_count_pictures(layouts)} alone")

    def check_text(self, text: str) -> None:
        """Check a text's length before it is encoded."""
        if self.limits.tokenizer.is_far_too_long(text, self._longest, self.field):
            raise self._too_long(f"has {len(text)} characters, far more than fit")

    def check_expanded(self, expanded: ExpandedPrompt, layouts: Sequence[PictureLayout] = ()) -> None:
        if not expanded.token_ids:
            raise InvalidArgumentError(self.field, "is empty")
        num_tokens = len(expanded.token_ids)
        if num_tokens > self._longest:
            num_media_tokens = sum(span.length for span in expanded.spans)
            of_pictures = f", {num_media_tokens} of them of {_count_pictures(layouts)}" if layouts else ""
            raise self._too_long(f"has {num_tokens} tokens{of_pictures}")
        largest = max(expanded.token_ids)
        if largest >= self.limits.vocab_size:
            token = self.limits.tokenizer.token(largest)
            raise ReservedTokenError(self.field, f"the text contains {token}, which is not a token of this model")

    @property
    def _longest(self) -> int:
        """The length of the longest prompt in tokens: an answer has at least one."""
        return self.limits.max_model_len - 1 if self.max_counted_tokens is None else self.max_counted_tokens

    def _too_long(self, what: str) -> InvalidArgumentError:
        if self.max_counted_tokens is not None:
            return InvalidArgumentError(self.field, f"{what}; one answer lists at most {self.max_counted_tokens}")
        # LangChain recognizes by the first of these words, and LiteLLM by the others (which are OpenAI's and vLLM's),
        # that a longer context would help. (They are not shown the error's code.)
        longest = self.limits.max_model_len
        limit = f"this model's maximum context length is {longest} tokens, at least one of them the answer's"
        return PromptTooLongError(self.field, f"{what}: the prompt is too long; {limit}")


def _count_pictures(layouts: Sequence[PictureLayout]) -> str:
    """Return how many parts of which kinds there are, with the crops of pictures and the moments of films."""
    num_parts = sum(layout.num_parts for layout in layouts)
    kinds = {layout.kind for layout in layouts}
    return f"{num_parts} {' and '.join(_PARTS[kind] for kind in KINDS if kind in kinds)}"
