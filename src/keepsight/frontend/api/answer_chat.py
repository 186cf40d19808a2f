"""The answer to a chat request, in OpenAI's format."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from keepsight.frontend.api.answer import AnswerTerms
from keepsight.frontend.api.build_message import MessageBuilder
from keepsight.frontend.api.chat_request import ChatRequest
from keepsight.frontend.api.chat_response import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChoiceLogprobs,
)
from keepsight.frontend.api.chunked_answer import ChunkedAnswer
from keepsight.frontend.api.response_parts import CompletionTokensDetails, Usage
from keepsight.frontend.assemble_answer import AnswerPiece


class ChatAnswer(ChunkedAnswer):
    ID_PREFIX = "chatcmpl-"

    def __init__(self, request: ChatRequest, terms: AnswerTerms) -> None:
        super().__init__(request, terms)
        # Per choice, when streaming. The factory does not refer to self: a cycle would keep the prompt until the next
        # garbage collection.
        self._make_builder = partial(MessageBuilder, terms.calls, may_think=self._may_think)
        self._builders = defaultdict[int, MessageBuilder](self._make_builder)
        self._is_predicted = request.prediction is not None

    def _forget_usage(self) -> None:
        super()._forget_usage()
        # Per choice: guessed tokens among those sent so far.
        self._num_guessed: dict[int, int] = {}

    def _count_token(self, piece: AnswerPiece) -> None:
        super()._count_token(piece)
        self._num_guessed[piece.choice] = piece.token.num_guessed

    @property
    def usage(self) -> Usage:
        usage = super().usage
        if not self._is_predicted:
            return usage
        num_predicted = self._num_choices * len(self.prompts[0].engine_request.predicted)
        accepted = sum(self._num_guessed.values())
        details = msgspec.structs.replace(
            usage.completion_tokens_details or CompletionTokensDetails(),
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=max(0, num_predicted - accepted),
        )
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _completion(self, choices: Sequence[Sequence[AnswerPiece]]) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model_name,
            choices=[self._choice(index, own) for index, own in enumerate(choices)],
            usage=self.usage,
            prompt_logprobs=self._prompt_logprobs(choices[0][0].token),
            prompt_token_ids=self._prompt_token_ids(),
        )

    def _choice(self, index: int, pieces: Sequence[AnswerPiece]) -> ChatChoice:
        last = pieces[-1]
        builder = self._make_builder()
        message, finish_reason = builder.whole_message(pieces), builder.name_end(last)
        assert finish_reason is not None
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=finish_reason,
            logprobs=self._logprobs(pieces),
            stop_reason=last.stop_reason,
            token_ids=self._token_ids(pieces),
        )

    def _openings(self) -> Sequence[ChatCompletionChunk]:
        opening = ChatDelta(role="assistant", content="")
        choices = [ChatChunkChoice(index=index, delta=opening) for index in range(self._num_choices)]
        first, *others = (self._chunk_of([choice]) for choice in choices)
        return [msgspec.structs.replace(first, prompt_token_ids=self._prompt_token_ids()), *others]

    def _chunk_choices(self, index: int, piece: AnswerPiece) -> Sequence[ChatChunkChoice]:
        """Return one choice per delta: the first has the log-probabilities and ids, the last the finish reason."""
        builder = self._builders[index]
        deltas = builder.deltas_of(piece)
        logprobs, token_ids = self._logprobs([piece]), self._token_ids([piece])
        if not deltas and (piece.finish_reason or logprobs or token_ids):
            deltas = [ChatDelta()]
        last = len(deltas) - 1 if piece.finish_reason else None
        return [
            ChatChunkChoice(
                index=index,
                delta=delta,
                finish_reason=builder.name_end(piece) if place == last else None,
                logprobs=None if place else logprobs,
                stop_reason=piece.stop_reason if place == last else msgspec.UNSET,
                token_ids=msgspec.UNSET if place else token_ids,
            )
            for place, delta in enumerate(deltas)
        ]

    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id, created=self._created, model=self._model_name, choices=choices, usage=usage
        )

    def _logprobs(self, pieces: Sequence[AnswerPiece]) -> ChoiceLogprobs | None:
        if self._request.choose_logprobs() is None:
            return None
        shown = [piece.token for piece in pieces if self._is_shown(piece)]
        return ChoiceLogprobs(content=[self._token_logprobs(token) for token in shown])
