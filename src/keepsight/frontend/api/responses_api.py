"""The stored responses, for `/v1/responses/{id}` and for conversations continued by the id of their last response."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepsight.errors import ResponseStoreError, UnknownResponseError, UnsupportedFieldError
from keepsight.frontend.api.access import tenant_of
from keepsight.frontend.api.answer_responses import KeepCallbacks, ResponsesAnswer
from keepsight.frontend.api.input_items import InputItems
from keepsight.frontend.api.kept_responses import KeptResponses, Turn
from keepsight.frontend.api.read_list_query import PAGE_PARAMETERS, PageQuery, read_page_query
from keepsight.frontend.api.responses_fields import Includable
from keepsight.frontend.http.decode_body import Buffer, without_mark
from keepsight.frontend.http.error_response import json_response
from keepsight.frontend.http.waiting_room import WaitingRoom
from keepsight.frontend.prompt.read_items import is_reference

logger = logging.getLogger(__name__)
# The input of a body up to this size is extracted on the event loop, that of a larger one on a thread.
MAX_BYTES_ON_LOOP = 2**16
# Query parameters and values that are accepted because they change nothing.
_NO_OP_QUERY_VALUES = {"stream": ("false",), "include": get_args(Includable), "include[]": get_args(Includable)}
_T = TypeVar("_T")
# The response's tenant, its id, and the id of the response before it.
_Name = tuple[str, str, str | None]


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class _RequestBody(msgspec.Struct):
    input: msgspec.Raw


class _ResponseBody(msgspec.Struct):
    id: str
    output: msgspec.Raw


_request_decoder, _response_decoder = msgspec.json.Decoder(_RequestBody), msgspec.json.Decoder(_ResponseBody)


class ResponsesApi:
    def __init__(self, kept: KeptResponses, room: WaitingRoom) -> None:
        self._kept, self._room = kept, room
        # The store handles one call at a time anyway; waiting for it must not occupy the threads that requests share.
        self._thread = ThreadPoolExecutor(1, "response keeper")
        # Total size of bodies whose answers are unfinished: their inputs are held, to be stored with the answers.
        self._num_pending_bytes = 0

    @property
    def routes(self) -> list[Route]:
        one = "/v1/responses/{id}"
        return [
            Route(one, self.retrieve, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/input_items", self.list_input, methods=["GET"]),
        ]

    async def retrieve(self, http: Request) -> Response:
        _check_query(http)
        response = await self._run(self._kept.get, tenant_of(http), http.path_params["id"])
        return json_response(msgspec.Raw(response))

    async def delete(self, http: Request) -> Response:
        response_id = http.path_params["id"]
        await self._run(self._kept.delete, tenant_of(http), response_id)
        return json_response(DeletedResponse(response_id))

    async def list_input(self, http: Request) -> Response:
        """List what the response answers: its own input behind the turns that it continues."""
        _check_query(http, PAGE_PARAMETERS)
        query = read_page_query(http)
        reference = (tenant_of(http), http.path_params["id"], "id")
        async with self._counting_bytes(*reference):
            return json_response(await self._run(self._list_input, *reference, query))

    @asynccontextmanager
    async def reading_before(self, http: Request, response_id: str) -> AsyncGenerator[tuple[list[Any], int], None]:
        """Yield the items of the conversation that ends with this response, and their size in bytes."""
        reference = (tenant_of(http), response_id, "previous_response_id")
        async with self._counting_bytes(*reference):
            yield await self._run(self._read_items, *reference)

    @asynccontextmanager
    async def _counting_bytes(self, *reference: str) -> AsyncGenerator[None, None]:
        """Count the stored size of a conversation in the waiting room, like a body, until the context exits."""
        num_bytes = await self._run(self._kept.count_bytes, *reference)
        self._room.take_bytes(num_bytes)
        try:
            yield
        finally:
            self._room.give_back_bytes(num_bytes)

    async def resolve(self, http: Request, items: object) -> object:
        """Return the items with references to answered items replaced by those items."""
        if not isinstance(items, list) or not any(map(_is_reference, items)):
            return items
        return await self._run(self._resolve, tenant_of(http), items, "input[{}].id")

    def keep(self, http: Request, body: Buffer, answer: ResponsesAnswer) -> None:
        """Arrange for the answer to be stored when it has ended, with the input in `body`."""
        if self._num_pending_bytes + len(body) <= self._kept.max_bytes:
            is_little = len(body) <= MAX_BYTES_ON_LOOP
            input_items = _read_input(body) if is_little else self._run(_read_input, body)
            self._num_pending_bytes += len(body)
            name = (tenant_of(http), answer.id, answer.previous_id)
            answer.keeping = KeepCallbacks(
                partial(self._keep_turn, name, input_items), partial(self._note_ended, len(body))
            )

    async def _keep_turn(
        self, name: _Name, input_items: bytes | Awaitable[bytes], response: bytes, item_ids: Sequence[str]
    ) -> bool:
        turn = Turn(input_items if isinstance(input_items, bytes) else await input_items, response)
        try:
            return await self._run(self._kept.keep, *name, turn, item_ids)
        except ResponseStoreError as error:  # the client gets its answer all the same
            logger.warning("%s", error)
            return False

    def _note_ended(self, num_bytes: int) -> None:
        """Stop counting the body of an answer that has ended, stored or not."""
        self._num_pending_bytes -= num_bytes

    def _read_items(self, tenant: str, response_id: str, field: str) -> tuple[list[Any], int]:
        items, num_bytes = list[Any](), 0
        for turn in self._kept.read(tenant, response_id, field):
            output = bytes(_response_decoder.decode(turn.response).output)
            items += [*_read_asked(turn), *msgspec.json.decode(output)]
            num_bytes += len(turn.asked) + len(output)
        return self._resolve(tenant, items, field), num_bytes

    def _list_input(self, tenant: str, response_id: str, field: str, query: PageQuery) -> msgspec.Raw:
        items = InputItems()
        for turn in self._kept.read(tenant, response_id, field):
            response = _response_decoder.decode(turn.response)
            items.add(self._resolve(tenant, _read_asked(turn), field), response.id)
            if response.id != response_id:
                items.add(msgspec.json.decode(response.output), response.id)
        return msgspec.Raw(msgspec.json.encode(items.page(query)))

    def _resolve(self, tenant: str, items: list[Any], field: str) -> list[Any]:
        """Replace references. `field`: the name of a reference's field, to be formatted with its index."""
        wanted = {item["id"] for item in items if _is_reference(item)}
        responses = self._kept.find_responses(tenant, wanted).values() if wanted else ()
        outputs = (_response_decoder.decode(each).output for each in responses)
        found = {item["id"]: item for each in outputs for item in msgspec.json.decode(each)}
        for at, item in enumerate(items):
            if _is_reference(item) and item["id"] not in found:
                reason = f"names no item of a response that is stored here (any more): {item['id'][:64]!r}"
                raise UnknownResponseError(field.format(at), reason)
        return [found[item["id"]] if _is_reference(item) else item for item in items]

    def _run(self, do: Callable[..., _T], *arguments: Any) -> Awaitable[_T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, do, *arguments)


def _check_query(http: Request, known: Sequence[str] = ()) -> None:
    for name, value in http.query_params.multi_items():
        if name not in known and value not in _NO_OP_QUERY_VALUES.get(name, ()):
            raise UnsupportedFieldError(name[:64], "is not supported by this server")


def _read_asked(turn: Turn) -> list[Any]:
    asked = msgspec.json.decode(turn.asked)
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else asked


def _read_input(body: Buffer) -> bytes:
    return bytes(_request_decoder.decode(without_mark(body)).input)


def _is_reference(item: object) -> bool:
    return isinstance(item, dict) and is_reference(item) and isinstance(item.get("id"), str)
