"""The answer to a request of the Responses API, in OpenAI's format."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from keepsight.errors import InvalidArgumentError
from keepsight.frontend.api.answer import Answer, AnswerTerms, Body, Engine
from keepsight.frontend.api.build_items import ItemBuilder
from keepsight.frontend.api.response_object import (
    Event,
    IncompleteDetails,
    Response,
    ResponseEvent,
    ResponseFault,
    ResponseUsage,
    StreamedEvent,
)
from keepsight.frontend.api.response_parts import ContentLogprob
from keepsight.frontend.api.responses_request import ResponsesChat
from keepsight.frontend.api.write_event import write_event
from keepsight.frontend.assemble_answer import AnswerPiece
from keepsight.frontend.http.error_response import ErrorResponse


@dataclass(frozen=True, slots=True)
class KeepCallbacks:
    """Callbacks that keep one answer. They do not refer to it: a cycle would hold it until a garbage collection."""

    # Called with the response and its items' ids before the final event is sent. False: it cannot be kept.
    keep: Callable[[bytes, Sequence[str]], Awaitable[bool]]
    # Called at the end of the answer, whatever its outcome.
    end: Callable[[], None]


class ResponsesAnswer(Answer):
    ID_PREFIX = "resp_"

    def __init__(self, request: ResponsesChat, terms: AnswerTerms) -> None:
        super().__init__(request, terms)
        self._items = ItemBuilder(terms.calls)
        self._is_cut = False
        # Set if the answer is to be kept.
        self.keeping: KeepCallbacks | None = None
        self._num_events = 0
        params = terms.prompts[0].engine_request.sampling_params
        self._begun = Response(
            **msgspec.structs.asdict(request.echo),
            id=self.id,
            created_at=self._created,
            status="in_progress",
            model=terms.model_name,
            output=[],
            store=False,
            temperature=params.temperature,
            top_p=params.top_p,
        )

    @property
    def previous_id(self) -> str | None:
        return self._begun.previous_response_id

    async def whole(self, engine: Engine) -> msgspec.Struct:
        try:
            return await super().whole(engine)
        finally:
            self._end_keeping()

    async def events(self, engine: Engine) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(super().events(engine)) as events:
                async for event in events:
                    yield event
        finally:
            self._end_keeping()

    def _end_keeping(self) -> None:
        if self.keeping is not None:
            self.keeping.end()

    def _completion(self, choices: Sequence[Sequence[AnswerPiece]]) -> Response:
        for piece in choices[0]:
            for _ in self._item_events(piece):
                pass
        return self._completed()

    def _open(self) -> Iterable[bytes]:
        begun = msgspec.structs.replace(self._begun, store=self.keeping is not None)
        yield self._write(ResponseEvent(type="response.created", response=begun))
        yield self._write(ResponseEvent(type="response.in_progress", response=begun))

    def _piece_events(self, index: int, piece: AnswerPiece) -> Iterable[bytes]:
        return map(self._write, self._item_events(piece))

    async def _close(self) -> Iterable[bytes]:
        response = await self._settle(self._with_account(self._completed()))
        kind: Literal["response.incomplete", "response.completed"]
        kind = "response.incomplete" if self._is_cut else "response.completed"
        return [self._write(ResponseEvent(type=kind, response=response))]

    async def _settle(self, body: Body) -> Body:
        if self.keeping is None:
            return body
        kept = msgspec.structs.replace(body, store=True)
        item_ids = [item.id for item in self._items.items]
        return kept if await self.keeping.keep(msgspec.json.encode(kept), item_ids) else body

    def _failure_event(self, error: Exception) -> bytes:
        details = ErrorResponse.of(error).error
        # OpenAI's codes for failed responses, which differ from those of its error bodies.
        code: Literal["invalid_prompt", "server_error"]
        code = "invalid_prompt" if isinstance(error, InvalidArgumentError) else "server_error"
        fault = ResponseFault(
            code=code, message=f"{details.code}: {details.message}" if details.code else details.message
        )
        failed = msgspec.structs.replace(self._begun, status="failed", output=self._items.items, error=fault)
        return self._write(ResponseEvent(type="response.failed", response=failed))

    def _item_events(self, piece: AnswerPiece) -> Iterator[StreamedEvent]:
        self._is_cut = piece.finish_reason == "length"
        return self._items.add_piece(piece, self._logprobs(piece))

    def _completed(self) -> Response:
        return msgspec.structs.replace(
            self._begun,
            status="incomplete" if self._is_cut else "completed",
            completed_at=None if self._is_cut else int(time.time()),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if self._is_cut else None,
            output=self._items.items,
            usage=ResponseUsage.of(self.usage),
        )

    def _logprobs(self, piece: AnswerPiece) -> list[ContentLogprob]:
        return [] if self._request.choose_logprobs() is None else [self._token_logprobs(piece.token)]

    def _write(self, event: Event) -> bytes:
        numbered: Any = msgspec.structs.replace(event, sequence_number=self._num_events)
        self._num_events += 1
        return write_event(numbered, numbered.type)
