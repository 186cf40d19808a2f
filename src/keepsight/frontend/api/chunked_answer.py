"""Common base of the answers to chats and completions: streams of chunks that have the shape of the whole answer, and
the fields that vLLM adds to OpenAI's.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from keepsight.frontend.api.answer import Answer
from keepsight.frontend.api.response_parts import PromptLogprob, PromptLogprobs, Usage, show_bytes, to_finite
from keepsight.frontend.api.write_event import write_event
from keepsight.frontend.assemble_answer import AnswerPiece
from keepsight.frontend.http.error_response import ErrorResponse
from keepsight.requests import TokenLogprob, TokenOutput


class ChunkedAnswer(Answer):
    STREAM_END = b"data: [DONE]\n\n"

    def _open(self) -> Iterable[bytes]:
        return map(write_event, self._openings())

    def _piece_events(self, index: int, piece: AnswerPiece) -> Iterator[bytes]:
        # A token may add no text yet; its log-probabilities and id are sent all the same.
        has_more = self._is_shown(piece) and (piece.token.logprobs or self._request.return_token_ids)
        if piece.text or piece.thought or piece.finish_reason or has_more:
            for choice in self._chunk_choices(index, piece):
                yield write_event(self._chunk_of([choice]))

    async def _close(self) -> Iterable[bytes]:
        last = [self._with_account(self._chunk_of([]))] if self._request.wants_account else []
        if self._request.includes_usage:
            last.append(self._chunk([], self.usage))
        return map(write_event, last)

    def _failure_event(self, error: Exception) -> bytes:
        return write_event(ErrorResponse.of(error))

    def _prompt_logprobs(self, first: TokenOutput) -> PromptLogprobs | msgspec.UnsetType:
        """Return `prompt_logprobs` if requested by that name. `first`: the first token of a prompt's first choice."""
        if (num_top := self._request.prompt_logprobs) is None:
            return msgspec.UNSET
        logprobs = first.prompt_logprobs
        assert logprobs is not None
        return [None, *({str(one.token_id): self._describe(one) for one in ones[: 1 + num_top]} for ones in logprobs)]

    def _prompt_token_ids(self, number: int = 0) -> list[int] | msgspec.UnsetType:
        if not self._request.return_token_ids:
            return msgspec.UNSET
        return list(self.prompts[number].engine_request.known_token_ids)

    def _token_ids(self, pieces: Sequence[AnswerPiece]) -> list[int] | msgspec.UnsetType:
        if not self._request.return_token_ids:
            return msgspec.UNSET
        return [piece.token.token_id for piece in pieces if self._is_shown(piece)] if self._request.wants_answer else []

    def _describe(self, one: TokenLogprob) -> PromptLogprob:
        shown = show_bytes(self._tokenizer.token_bytes(one.token_id))
        return PromptLogprob(logprob=to_finite(one.logprob), rank=one.rank, decoded_token=shown)

    def _chunk_of(self, choices: list[Any]) -> Any:
        usage = self.usage if self._request.counts_continuously else None
        return self._chunk(choices, usage if self._request.includes_usage else msgspec.UNSET)

    @abstractmethod
    def _openings(self) -> Sequence[msgspec.Struct]:
        """Return the chunks that begin a stream."""

    @abstractmethod
    def _chunk_choices(self, index: int, piece: AnswerPiece) -> Sequence[msgspec.Struct]:
        """Return what to send of a piece, each element in a chunk of its own."""

    @abstractmethod
    def _chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> msgspec.Struct: ...
