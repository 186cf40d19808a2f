"""The answer to a completion request, in OpenAI's shapes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from keepsight.frontend.answer import Answer
from keepsight.frontend.assemble_answer import AnswerPiece
from keepsight.frontend.chat_response import TopLogprob, Usage
from keepsight.frontend.completion_response import Completion, CompletionChoice, CompletionLogprobs
from keepsight.requests import TokenLogprob, TokenOutput


class CompletionAnswer(Answer):
    ID_PREFIX = "cmpl"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # By choice, of a stream: characters of the tokens that were told.
        self._offsets: Counter[int] = Counter()

    def _completion(self, choices: Sequence[Sequence[AnswerPiece]]) -> Completion:
        return self._chunk([self._choice(index, own) for index, own in enumerate(choices)], self.usage)

    def _choice(self, index: int, pieces: Sequence[AnswerPiece]) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text="".join(piece.text for piece in pieces),
            finish_reason=pieces[-1].finish_reason,
            logprobs=self._logprobs([piece.token for piece in pieces]),
            stop_reason=pieces[-1].stop_reason,
        )

    def _chunk_choice(self, index: int, piece: AnswerPiece) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=piece.text,
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs([piece.token], index),
            stop_reason=msgspec.UNSET if piece.finish_reason is None else piece.stop_reason,
        )

    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model_name, choices=choices, usage=usage)

    def _logprobs(self, tokens: Sequence[TokenOutput], streamed: int | None = None) -> CompletionLogprobs | None:
        """`streamed`: the choice whose tokens these continue."""
        if self._asked.choose_logprobs() is None:
            return None
        each = [[self._top_logprob(one) for one in token.logprobs or ()] for token in tokens]
        offsets, end = self._find_offsets(tokens, 0 if streamed is None else self._offsets[streamed])
        if streamed is not None:
            self._offsets[streamed] = end
        return CompletionLogprobs(
            tokens=[sampled.token for sampled, *_ in each],
            token_logprobs=[sampled.logprob for sampled, *_ in each],
            # As vLLM: the sampled token is told among the likeliest, whether it is one of them or not.
            top_logprobs=[_by_token(ones) for ones in each],
            text_offset=offsets,
        )

    def _find_offsets(self, tokens: Sequence[TokenOutput], end: int) -> tuple[list[int], int]:
        """Where in the text each begins, and where the last ends.  Several may be one character, and begin there."""
        params = self._prompts[0].engine_request.sampling_params
        offsets = []
        for token in tokens:
            is_shown = not (params.skip_special_tokens and self._tokenizer.is_special(token.token_id))
            shown = self._tokenizer.token_bytes(token.token_id) if is_shown else b""
            goes_on = bool(shown) and not _begins_character(shown[0])
            offsets.append(max(0, end - goes_on))
            end += sum(map(_begins_character, shown))
        return offsets, end

    def _top_logprob(self, logprob: TokenLogprob) -> TopLogprob:
        return TopLogprob.of_bytes(self._tokenizer.token_bytes(logprob.token_id), logprob.logprob)


def _by_token(logprobs: Sequence[TopLogprob]) -> dict[str, float]:
    """Of those that look alike, as all parts of characters do, the first: the sampled one, or the likeliest."""
    told: dict[str, float] = {}
    for each in logprobs:
        told.setdefault(each.token, each.logprob)
    return told


def _begins_character(byte: int) -> bool:
    """Of UTF-8."""
    return byte & 0b1100_0000 != 0b1000_0000
