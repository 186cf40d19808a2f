"""The answer to a chat request, in OpenAI's shapes."""

from collections.abc import Sequence
from typing import Any

import msgspec

from keepsight.frontend.api.answer import Answer
from keepsight.frontend.api.chat_response import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChoiceLogprobs,
    ContentLogprob,
    Usage,
)
from keepsight.frontend.assemble_answer import AnswerPiece
from keepsight.requests import TokenOutput


class ChatAnswer(Answer):
    ID_PREFIX = "chatcmpl"

    def _completion(self, choices: Sequence[Sequence[AnswerPiece]]) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model_name,
            choices=[self._choice(index, own) for index, own in enumerate(choices)],
            usage=self.usage,
            prompt_logprobs=self._tell_prompt(choices[0][0].token),
            prompt_token_ids=self._tell_prompt_ids(),
        )

    def _choice(self, index: int, pieces: Sequence[AnswerPiece]) -> ChatChoice:
        last = pieces[-1]
        assert last.finish_reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(content="".join(piece.text for piece in pieces)),
            finish_reason=last.finish_reason,
            logprobs=self._logprobs([piece.token for piece in pieces]),
            stop_reason=last.stop_reason,
            token_ids=self._tell_ids(pieces),
        )

    def _openings(self) -> Sequence[ChatCompletionChunk]:
        opening = ChatDelta(role="assistant", content="")
        choices = [ChatChunkChoice(index=index, delta=opening) for index in range(self._num_choices)]
        first, *others = (self._chunk_of([choice]) for choice in choices)
        return [msgspec.structs.replace(first, prompt_token_ids=self._tell_prompt_ids()), *others]

    def _chunk_choice(self, index: int, piece: AnswerPiece) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=piece.text) if piece.text else ChatDelta(),
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs([piece.token]),
            stop_reason=msgspec.UNSET if piece.finish_reason is None else piece.stop_reason,
            token_ids=self._tell_ids([piece]),
        )

    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model_name, choices=choices, usage=usage
        )

    def _logprobs(self, tokens: Sequence[TokenOutput]) -> ChoiceLogprobs | None:
        if self._asked.choose_logprobs() is None:
            return None
        return ChoiceLogprobs(content=[self._token_logprobs(token) for token in tokens])

    def _token_logprobs(self, token: TokenOutput) -> ContentLogprob:
        assert token.logprobs is not None
        sampled, *top = map(self._top_logprob, token.logprobs)
        return ContentLogprob(
            token=sampled.token, logprob=sampled.logprob, byte_values=sampled.byte_values, top_logprobs=top
        )
