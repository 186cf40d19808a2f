"""The answer to a chat request in OpenAI's form, whole or as a stream of server-sent events."""

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from keepsight.errors import EngineLostError
from keepsight.frontend.assemble_answer import AnswerAssembler, AnswerPiece
from keepsight.frontend.chat_request import ChatRequest
from keepsight.frontend.chat_response import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChoiceLogprobs,
    ContentLogprob,
    ErrorResponse,
    TopLogprob,
    Usage,
)
from keepsight.frontend.prepare_request import PreparedRequest
from keepsight.frontend.tokenizer import Tokenizer
from keepsight.requests import TokenOutput

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
# Of an answer that is told whole: so many engines may end before it is given up.
MAX_ATTEMPTS = 3


class Engine(Protocol):
    """What an answer needs of an `EngineClient`."""

    @property
    def is_connected(self) -> bool: ...

    def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]: ...

    def stop_choice(self, request_id: str, choice: int) -> None: ...


class ChatAnswer:
    """One request on its way through the engine."""

    def __init__(self, asked: ChatRequest, prepared: PreparedRequest, tokenizer: Tokenizer, model_name: str) -> None:
        self._asked, self._prepared, self._tokenizer, self._model_name = asked, prepared, tokenizer, model_name
        self._request = prepared.engine_request
        self._id, self._created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._num_tokens = 0
        # Of the choice that found least: the others find what that one has just computed.
        self._num_cached_tokens = len(prepared.engine_request.token_ids)

    async def whole(self, engine: Engine) -> ChatCompletion:
        choices = await self._gather(engine)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model_name,
            choices=[self._choice(index, own) for index, own in enumerate(choices)],
            usage=self._usage(),
        )

    async def _gather(self, engine: Engine) -> list[list[AnswerPiece]]:
        """All pieces of each choice.  Nobody has seen any of them yet, so a new engine may begin anew."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            choices: list[list[AnswerPiece]] = [[] for _ in range(self._request.sampling_params.n)]
            self._num_tokens = 0
            try:
                async with aclosing(self._pieces(engine)) as pieces:
                    async for piece in pieces:
                        choices[piece.choice].append(piece)
            except EngineLostError:
                if attempt == MAX_ATTEMPTS:
                    raise
            else:
                break
        return choices

    async def events(self, engine: Engine) -> AsyncGenerator[bytes, None]:
        """The first comes with the first token: what fails before is raised.  What fails later is an event too."""
        has_begun = False
        try:
            async with aclosing(self._chunks(engine)) as chunks:
                async for chunk in chunks:
                    has_begun = True
                    yield chunk
        except Exception as error:
            if not has_begun:
                raise
            logger.exception("the answer %s failed", self._id)
            yield b"data: " + _encode(ErrorResponse.of(error)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _chunks(self, engine: Engine) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with aclosing(self._pieces(engine)) as pieces:
            async for piece in pieces:
                if not has_begun:
                    has_begun = True
                    for index in range(self._request.sampling_params.n):
                        yield self._event(ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
                # A token may add no text yet; its log-probability is told all the same.
                if piece.text or piece.finish_reason or piece.token.logprobs:
                    yield self._event(self._chunk_choice(piece))
        if self._asked.includes_usage:
            yield self._event(usage=self._usage())

    async def _pieces(self, engine: Engine) -> AsyncGenerator[AnswerPiece, None]:
        assembler = AnswerAssembler(self._tokenizer, self._request.sampling_params)
        async with aclosing(engine.generate(self._prepared)) as tokens:
            async for token in tokens:
                if piece := assembler.push(token):
                    self._num_tokens += 1
                    self._num_cached_tokens = min(self._num_cached_tokens, token.num_cached_tokens)
                    if piece.ends_before_engine:
                        engine.stop_choice(self._request.request_id, piece.choice)
                    yield piece
                if assembler.is_finished:
                    return

    def _usage(self) -> Usage:
        num_image_tokens = sum(item.span.length for item in self._request.media)
        return Usage.count(len(self._request.token_ids), self._num_tokens, num_image_tokens, self._num_cached_tokens)

    def _choice(self, index: int, pieces: Sequence[AnswerPiece]) -> ChatChoice:
        last = pieces[-1]
        assert last.finish_reason is not None
        return ChatChoice(
            index=index,
            message=ChatMessage(content="".join(piece.text for piece in pieces)),
            finish_reason=last.finish_reason,
            logprobs=self._logprobs([piece.token for piece in pieces]),
            stop_reason=last.stop_reason,
        )

    def _chunk_choice(self, piece: AnswerPiece) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=piece.choice,
            delta=ChatDelta(content=piece.text) if piece.text else ChatDelta(),
            finish_reason=piece.finish_reason,
            logprobs=self._logprobs([piece.token]),
            stop_reason=msgspec.UNSET if piece.finish_reason is None else piece.stop_reason,
        )

    def _event(self, choice: ChatChunkChoice | None = None, usage: Usage | None = None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model_name,
            choices=[] if choice is None else [choice],
            usage=usage if self._asked.includes_usage else msgspec.UNSET,
        )
        return b"data: " + _encode(chunk) + b"\n\n"

    def _logprobs(self, tokens: Sequence[TokenOutput]) -> ChoiceLogprobs | None:
        if not self._asked.logprobs:
            return None
        return ChoiceLogprobs(content=[self._token_logprobs(token) for token in tokens])

    def _token_logprobs(self, token: TokenOutput) -> ContentLogprob:
        assert token.logprobs is not None
        sampled, *top = [
            TopLogprob.of_bytes(self._tokenizer.token_bytes(each.token_id), each.logprob) for each in token.logprobs
        ]
        return ContentLogprob(
            token=sampled.token, logprob=sampled.logprob, byte_values=sampled.byte_values, top_logprobs=top
        )
