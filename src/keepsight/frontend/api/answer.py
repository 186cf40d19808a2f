"""The answer to one HTTP request, whole or as a stream of server-sent events: everything but the shape of its JSON.

A request has one or more prompts, each of which the engine answers `n` times. Invariant: the reported usage counts
exactly the tokens that were sent.
"""

import asyncio
import dataclasses
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import msgspec

from keepsight.errors import (
    EngineLostError,
    InvalidArgumentError,
    RequestFailedError,
    SlowReaderError,
    renaming_fields,
)
from keepsight.frontend.api.generation_fields import GenerationFields
from keepsight.frontend.api.response_parts import ContentLogprob, Extras, TopLogprob, Usage, show_bytes, to_finite
from keepsight.frontend.api.tool_fields import NO_CALLS, CallTerms
from keepsight.frontend.assemble_answer import AnswerAssembler, AnswerPiece
from keepsight.frontend.media_query import MediaPlaces
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.observe.account import RequestAccount
from keepsight.requests import FinishReason, TierStatus, TokenLogprob, TokenOutput

logger = logging.getLogger(__name__)
# An answer that is not streamed is given up once this many engines have been lost while generating it.
MAX_ATTEMPTS = 3
# Builds large answers, one at a time: each further thread would delay the event loop more.
_large_answers_executor = ThreadPoolExecutor(1, "large answers")
# So many log-probabilities are written in five milliseconds; an answer may have millions.
MAX_LOGPROBS_ON_LOOP = 1024
# Capacity of the queue that merges several prompts' pieces: how far they may run ahead of the consumer.
MAX_MERGED_PIECES = 64
Body = TypeVar("Body", bound=msgspec.Struct)
# The index of a choice among those of the whole answer, and a piece of it.
IndexedPiece = tuple[int, AnswerPiece]


class Engine(Protocol):
    """The part of `EngineClient` that the HTTP API uses."""

    @property
    def num_engines(self) -> int: ...

    @property
    def num_silent_engines(self) -> int: ...

    def list_tiers(self) -> Mapping[int, Sequence[TierStatus]]: ...

    def engine_holds(self, media_hash: str) -> bool: ...

    async def find_media(self, media_hashes: Iterable[str]) -> MediaPlaces: ...

    def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]: ...

    def holding_ends(self, accounts: Sequence[RequestAccount]) -> AbstractContextManager[None]: ...

    def note_read(self, request_id: str, choice: int, finish_reason: FinishReason | None) -> None: ...

    def reset_caches(self, *, prefix: bool = False, encoder: bool = False, processor: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class AnswerTerms:
    """What an answer of any shape is built from, besides the fields of its request."""

    prompts: Sequence[PreparedRequest]
    tokenizer: Tokenizer
    model_name: str
    # Which functions it may call.
    calls: CallTerms = NO_CALLS


class AskedPrompts:
    """The prompts of one HTTP request, and what every kind of answer reports of them: id, accounts and usage."""

    ID_PREFIX: ClassVar[str]

    def __init__(self, prompts: Sequence[PreparedRequest], model_name: str, *, wants_account: bool) -> None:
        self.prompts, self._model_name, self._wants_account = prompts, model_name, wants_account
        self.id, self._created = f"{self.ID_PREFIX}{os.urandom(16).hex()}", int(time.time())

    @property
    def accounts(self) -> list[RequestAccount]:
        return [each.account for each in self.prompts]

    def name_accounts(self, request_id: str, began: float, trace_parent: str | None) -> None:
        """Give all accounts the request id, start time and trace parent under which the client knows the request."""
        for account in self.accounts:
            account.name(request_id, began, trace_parent)

    def _with_account(self, body: Body) -> Body:
        """Return the body with the accounts added, if the client asked for them."""
        if not self._wants_account:
            return body
        return msgspec.structs.replace(body, keepsight=Extras([each.describe() for each in self.accounts]))

    def _count_usage(self, num_tokens: int, num_cached: int, num_thought: int | None = None) -> Usage:
        requests = [each.engine_request for each in self.prompts]
        return Usage.count(
            num_prompt_tokens=sum(len(each.token_ids) for each in requests),
            num_completion_tokens=num_tokens,
            num_image_tokens=sum(each.num_image_tokens for each in requests),
            num_cached_tokens=num_cached,
            num_thought_tokens=num_thought,
            num_audio_tokens=sum(each.num_audio_tokens for each in requests),
        )


class Answer(AskedPrompts, ABC):
    """A generation request in progress: the engine continues each of its prompts."""

    # The last bytes of every stream, failed or not.
    STREAM_END: ClassVar[bytes] = b""

    def __init__(self, request: GenerationFields, terms: AnswerTerms) -> None:
        super().__init__(terms.prompts, terms.model_name, wants_account=request.wants_account)
        self._request, self._tokenizer = request, terms.tokenizer
        self._num_choices = terms.prompts[0].engine_request.sampling_params.n
        for account in self.accounts:
            account.wants_answer = request.wants_answer
        self._forget_usage()

    def _forget_usage(self) -> None:
        self._num_tokens = self._num_thought_tokens = 0
        # Per prompt with output so far: the fewest of any choice, as the others find what that one has just computed.
        self._num_cached_tokens: dict[int, int] = {}

    @property
    def _may_think(self) -> bool:
        return self.prompts[0].thought is not None

    @property
    def is_streamed(self) -> bool:
        return bool(self._request.stream)

    async def whole(self, engine: Engine) -> msgspec.Struct:
        with engine.holding_ends(self.accounts):
            choices = await self._gather(engine)
        if self._is_large(choices):
            loop = asyncio.get_running_loop()
            completion = await loop.run_in_executor(_large_answers_executor, self._completion, choices)
        else:
            completion = self._completion(choices)
        return await self._settle(self._with_account(completion))

    def _is_large(self, choices: Sequence[Sequence[AnswerPiece]]) -> bool:
        if self._request.choose_prompt_logprobs() is not None:
            return True
        num_top = self._request.choose_logprobs()
        return num_top is not None and sum(map(len, choices)) * (1 + num_top) > MAX_LOGPROBS_ON_LOOP

    async def _settle(self, body: Body) -> Body:
        """Called with the finished body before the end of the answer is sent; returns the body to send."""
        return body

    async def _gather(self, engine: Engine) -> list[list[AnswerPiece]]:
        """Collect all pieces of each choice. The client has seen none yet, so a lost generation may be restarted."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            choices: list[list[AnswerPiece]] = [[] for _ in range(len(self.prompts) * self._num_choices)]
            self._forget_usage()
            try:
                async with aclosing(self._pieces(engine)) as pieces:
                    async for index, piece in pieces:
                        self._count_token(piece)
                        choices[index].append(piece)
            except EngineLostError as lost:
                if attempt == MAX_ATTEMPTS or not lost.had_begun:
                    raise
                self.prompts = [each.asked_again() for each in self.prompts]
            else:
                break
        return choices

    async def events(self, engine: Engine) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream.

        The first comes with the first token. A failure before it is raised; a later one is sent as an event.
        """
        has_begun = False
        try:
            async with aclosing(self._events(engine)) as events:
                async for event in events:
                    has_begun = True
                    yield event
        except Exception as error:
            if not has_begun:
                raise
            if isinstance(error, InvalidArgumentError):
                # The message is not logged: it may quote the caller's input.
                logger.info("the answer %s failed because of the request's %s", self.id, error.field)
            elif isinstance(error, SlowReaderError):
                logger.info("the answer %s was cut off, as its client read too slowly: %s", self.id, error)
            else:
                is_foreseen = isinstance(error, RequestFailedError)
                logger.error("the answer %s failed: %s", self.id, error, exc_info=not is_foreseen)
            yield self._failure_event(error)
        if self.STREAM_END:
            yield self.STREAM_END

    async def _events(self, engine: Engine) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with aclosing(self._pieces(engine)) as pieces:
            async for index, piece in pieces:
                if not has_begun:
                    has_begun = True
                    for event in self._open():
                        yield event
                self._count_token(piece)
                for event in self._piece_events(index, piece):
                    yield event
        for event in await self._close():
            yield event

    def _pieces(self, engine: Engine) -> AsyncGenerator[IndexedPiece, None]:
        own = [self._pieces_of(engine, number) for number in range(len(self.prompts))]
        return own[0] if len(own) == 1 else _merge(own)

    async def _pieces_of(self, engine: Engine, number: int) -> AsyncGenerator[IndexedPiece, None]:
        prepared = self.prompts[number]
        engine_request = prepared.engine_request
        assembler = AnswerAssembler(
            self._tokenizer,
            engine_request.sampling_params,
            prepared.thought,
            continues_prompt=prepared.continues_prompt,
        )
        with renaming_fields(self._request.client_field_name):
            async with aclosing(engine.generate(prepared)) as tokens:
                async for token in tokens:
                    if found := assembler.push(token):
                        piece = self._as_shown(found)
                        least = self._num_cached_tokens.get(number, token.num_cached_tokens)
                        self._num_cached_tokens[number] = min(least, token.num_cached_tokens)
                        engine.note_read(engine_request.request_id, piece.choice, piece.finish_reason)
                        yield number * self._num_choices + piece.choice, piece
                    if assembler.is_finished:
                        return

    def _as_shown(self, piece: AnswerPiece) -> AnswerPiece:
        """Return the piece without the texts that the client did not ask for."""
        if not self._request.wants_answer:
            return AnswerPiece(piece.token, "", "length")
        return piece if self._is_shown(piece) else dataclasses.replace(piece, thought="")

    def _is_shown(self, piece: AnswerPiece) -> bool:
        return not piece.is_of_thought or self._request.shows_thoughts

    def _count_token(self, piece: AnswerPiece) -> None:
        """Count a token when it is sent, not when it is generated.

        A stream's opening events do not count it yet, and some of several prompts run ahead of what is sent.
        """
        if self._request.wants_answer:
            self._num_tokens += 1
            self._num_thought_tokens += piece.is_of_thought

    @property
    def usage(self) -> Usage:
        num_thought = self._num_thought_tokens if self._may_think else None
        return self._count_usage(self._num_tokens, sum(self._num_cached_tokens.values()), num_thought)

    def _token_logprobs(self, token: TokenOutput) -> ContentLogprob:
        assert token.logprobs is not None
        sampled, *top = map(self._top_logprob, token.logprobs)
        return ContentLogprob(
            token=sampled.token, logprob=sampled.logprob, byte_values=sampled.byte_values, top_logprobs=top
        )

    def _top_logprob(self, one: TokenLogprob) -> TopLogprob:
        token_bytes = self._tokenizer.token_bytes(one.token_id)
        return TopLogprob(
            token=self._name_token(one.token_id), logprob=to_finite(one.logprob), byte_values=list(token_bytes)
        )

    def _name_token(self, token_id: int) -> str:
        """Return the text that stands for a token in log-probabilities."""
        if self._request.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return show_bytes(self._tokenizer.token_bytes(token_id))

    # The JSON shape ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _completion(self, choices: Sequence[Sequence[AnswerPiece]]) -> msgspec.Struct:
        """Return the body of an answer that is not streamed."""

    @abstractmethod
    def _open(self) -> Iterable[bytes]:
        """Return the events that begin a stream."""

    @abstractmethod
    def _piece_events(self, index: int, piece: AnswerPiece) -> Iterable[bytes]: ...

    @abstractmethod
    async def _close(self) -> Iterable[bytes]:
        """Return the events that end a stream that did not fail."""

    @abstractmethod
    def _failure_event(self, error: Exception) -> bytes: ...


async def _merge(sources: Sequence[AsyncGenerator[IndexedPiece, None]]) -> AsyncGenerator[IndexedPiece, None]:
    """Yield the pieces of all sources in the order in which they arrive. The first failure ends all sources."""
    arrived = asyncio.Queue[IndexedPiece | Exception | None](MAX_MERGED_PIECES)
    drains = [asyncio.create_task(_drain(source, arrived)) for source in sources]
    num_open = len(drains)
    try:
        while num_open:
            each = await arrived.get()
            if isinstance(each, Exception):
                raise each
            if each is None:
                num_open -= 1
            else:
                yield each
    finally:
        for drain in drains:
            drain.cancel()
        await asyncio.gather(*drains, return_exceptions=True)


async def _drain(
    source: AsyncGenerator[IndexedPiece, None], arrived: "asyncio.Queue[IndexedPiece | Exception | None]"
) -> None:
    try:
        async with aclosing(source):
            async for piece in source:
                await arrived.put(piece)
        await arrived.put(None)
    except Exception as error:
        await arrived.put(error)
