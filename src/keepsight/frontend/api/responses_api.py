"""`/v1/responses/{id}`, and conversations that go on by the id of their last response: what is kept for both."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepsight.frontend.api.answer_responses import ResponsesAnswer
from keepsight.frontend.api.kept_responses import KeptResponses, Turn
from keepsight.frontend.api.media_api import tenant_of
from keepsight.frontend.http.decode_body import Buffer
from keepsight.frontend.http.error_response import json_response


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class _Asked(msgspec.Struct):
    input: msgspec.Raw


class _Told(msgspec.Struct):
    output: list[dict[str, Any]]


_asked, _told = msgspec.json.Decoder(_Asked), msgspec.json.Decoder(_Told)


class ResponsesApi:
    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept

    @property
    def routes(self) -> list[Route]:
        one = "/v1/responses/{id}"
        return [Route(one, self.tell, methods=["GET"]), Route(one, self.delete, methods=["DELETE"])]

    async def tell(self, http: Request) -> Response:
        response = await run_in_threadpool(self._kept.get, tenant_of(http), http.path_params["id"])
        return json_response(msgspec.Raw(response))

    async def delete(self, http: Request) -> Response:
        response_id = http.path_params["id"]
        await run_in_threadpool(self._kept.delete, tenant_of(http), response_id)
        return json_response(DeletedResponse(response_id))

    async def read_before(self, http: Request, response_id: str) -> tuple[list[Any], int]:
        """The items of the conversation that ends with it, and their bytes."""
        return await run_in_threadpool(self._read_before, tenant_of(http), response_id)

    def keep(self, http: Request, body: Buffer, answer: ResponsesAnswer) -> None:
        """What was asked while it is answered, for its bytes shall not lie in this process; the answer once it ends."""
        tenant = tenant_of(http)
        begun = asyncio.create_task(run_in_threadpool(self._begin, tenant, answer.id, answer.previous_id, body))

        async def finish(response: bytes) -> bool:
            return await begun and await run_in_threadpool(self._kept.finish, tenant, answer.id, response)

        answer.on_ended = finish

    def _begin(self, tenant: str, response_id: str, previous: str | None, body: Buffer) -> bool:
        return self._kept.begin(tenant, response_id, previous, bytes(_asked.decode(body).input))

    def _read_before(self, tenant: str, response_id: str) -> tuple[list[Any], int]:
        turns = self._kept.find_turns(tenant, response_id, "previous_response_id")
        return _join(turns), sum(len(turn.input) + len(turn.response) for turn in turns)


def _join(turns: Sequence[Turn]) -> list[Any]:
    items: list[Any] = []
    for turn in turns:
        asked = msgspec.json.decode(turn.input)
        items += [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        items += _told.decode(turn.response).output
    return items
