"""Rejects prompts that are too long and tokens that do not exist; errors give the numbers."""

from collections.abc import Mapping, Sequence

from keepsight.errors import InvalidArgumentError, PromptTooLongError, ReservedTokenError
from keepsight.frontend.prompt.expand_prompt import ExpandedPrompt
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.media import KINDS, SEVERAL, Kind, PictureLayout
from keepsight.sampling_params import SamplingParams

# How errors name the media parts of a prompt.
_PARTS: Mapping[Kind, str] = {**SEVERAL, "video": "moments of videos"}


class PromptLimits:
    """The limits of prompts. `max_counted_tokens` is None for a prompt that is to be answered and must fit into the
    context; otherwise only its tokens are returned, up to that many.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer, self.max_model_len, self._vocab_size = tokenizer, max_model_len, vocab_size

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size

    def check_pictures(self, layouts: Sequence[PictureLayout], field: str, max_counted_tokens: int | None) -> None:
        """Check the number of media tokens, before any crops and tokens are laid out."""
        num_media_tokens = sum(layout.num_tokens for layout in layouts)
        if num_media_tokens > self._longest(max_counted_tokens):
            what = f"has {num_media_tokens} tokens of {_count_pictures(layouts)} alone"
            raise self._too_long(field, what, max_counted_tokens)

    def check_text(self, text: str, field: str, max_counted_tokens: int | None) -> None:
        """Check a text's length before it is encoded."""
        if self._tokenizer.is_far_too_long(text, self._longest(max_counted_tokens), field):
            raise self._too_long(field, f"has {len(text)} characters, far more than fit", max_counted_tokens)

    def check_expanded(
        self,
        expanded: ExpandedPrompt,
        field: str,
        max_counted_tokens: int | None,
        layouts: Sequence[PictureLayout] = (),
    ) -> None:
        if not expanded.token_ids:
            raise InvalidArgumentError(field, "is empty")
        num_tokens = len(expanded.token_ids)
        if num_tokens > self._longest(max_counted_tokens):
            num_media_tokens = sum(span.length for span in expanded.spans)
            of_pictures = f", {num_media_tokens} of them of {_count_pictures(layouts)}" if layouts else ""
            raise self._too_long(field, f"has {num_tokens} tokens{of_pictures}", max_counted_tokens)
        largest = max(expanded.token_ids)
        if largest >= self._vocab_size:
            token = self._tokenizer.token(largest)
            raise ReservedTokenError(field, f"the text contains {token}, which is not a token of this model")

    def check_is_token(self, token_id: int, place: str) -> None:
        if not self.has_token(token_id):
            raise InvalidArgumentError(place, f"{token_id} is not one of this model's {self._vocab_size} tokens")

    def check_named_tokens(self, params: SamplingParams) -> None:
        for name in ("allowed_token_ids", "stop_token_ids"):
            token_ids = getattr(params, name) or ()
            if len(token_ids) > self._vocab_size:
                raise InvalidArgumentError(name, f"must hold at most this model's {self._vocab_size} tokens, each once")
            for index, token_id in enumerate(token_ids):
                self.check_is_token(token_id, f"{name}[{index}]")
        for token_id in params.logit_bias or ():
            self.check_is_token(token_id, f"logit_bias[{token_id}]")

    def _longest(self, max_counted_tokens: int | None) -> int:
        """Return the length of the longest prompt in tokens: an answer has at least one."""
        return self.max_model_len - 1 if max_counted_tokens is None else max_counted_tokens

    def _too_long(self, field: str, what: str, max_counted_tokens: int | None) -> InvalidArgumentError:
        if max_counted_tokens is not None:
            return InvalidArgumentError(field, f"{what}; one answer lists at most {max_counted_tokens}")
        # LangChain recognizes by the first of these words, and LiteLLM by the others (which are OpenAI's and vLLM's),
        # that a longer context would help. (They are not shown the error's code.)
        limit = f"this model's maximum context length is {self.max_model_len} tokens, at least one of them the answer's"
        return PromptTooLongError(field, f"{what}: the prompt is too long; {limit}")


def _count_pictures(layouts: Sequence[PictureLayout]) -> str:
    """Return how many parts of which kinds there are, with the crops of pictures and the moments of films."""
    num_parts = sum(layout.num_parts for layout in layouts)
    kinds = {layout.kind for layout in layouts}
    return f"{num_parts} {' and '.join(_PARTS[kind] for kind in KINDS if kind in kinds)}"
