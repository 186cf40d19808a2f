"""The HTTP face: routes, bodies in, errors out.  What an endpoint does lies in the modules it calls."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from keepsight import __version__
from keepsight.errors import (
    BodyTooLargeError,
    EngineLostError,
    InvalidArgumentError,
    ModelNotFoundError,
    RequestFailedError,
)
from keepsight.frontend.answer_chat import ChatAnswer, Engine
from keepsight.frontend.chat_request import ChatRequest, parse_chat_request
from keepsight.frontend.chat_response import SERVER_FAILED, ErrorDetail, ErrorResponse, ModelCard, ModelList
from keepsight.frontend.media_intake import NOTHING_DOWNLOADED, Downloaded
from keepsight.frontend.prepare_request import PreparedRequest, RequestPreparer
from keepsight.frontend.serve_page import page_routes

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 100 * 2**20
# Seconds: about what an engine takes to be there again.
RETRY_LATER = {"Retry-After": "2"}
CLIENT_CLOSED_REQUEST = 499  # nginx's number, for nobody but our own log
Answer = TypeVar("Answer")


class _EventStream(StreamingResponse):
    """Closes its events however it ends: a client that leaves frees the engine now, not when garbage is collected."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(_chain(first, events), media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


class Api:
    def __init__(self, preparer: RequestPreparer, engine: Engine, model_name: str) -> None:
        self._preparer, self._engine, self._model_name = preparer, engine, model_name
        self._card = ModelCard(id=model_name, created=int(time.time()), max_model_len=preparer.max_model_len)

    async def chat_completions(self, http: Request) -> Response:
        asked = parse_chat_request(await _read_body(http))
        self._check_model(asked.model)
        downloaded = await self._download(http, asked)
        prepared = await run_in_threadpool(self._prepare, asked, downloaded)
        answer = ChatAnswer(asked, prepared, self._preparer.tokenizer, self._model_name)
        if asked.stream:
            events = answer.events(self._engine)
            # What fails before the first token still gets a status of its own.
            first = await _unless_client_leaves(http, anext(events))
            return _EventStream(first, events)
        return _json(await _unless_client_leaves(http, answer.whole(self._engine)))

    async def models(self, _http: Request) -> Response:
        return _json(ModelList(data=[self._card]))

    async def model(self, http: Request) -> Response:
        self._check_model(http.path_params["model"])
        return _json(self._card)

    async def health(self, _http: Request) -> Response:
        if not self._engine.is_connected:
            return _json({"status": "the engine is being started again"}, status=503, headers=RETRY_LATER)
        return _json({"status": "ok"})

    async def version(self, _http: Request) -> Response:
        return _json({"version": __version__})

    async def _download(self, http: Request, asked: ChatRequest) -> Downloaded:
        """Before the request takes a thread: a slow origin must not hold one."""
        remote = self._preparer.pictures_to_download(asked.messages)
        if not remote:
            return NOTHING_DOWNLOADED
        return await _unless_client_leaves(http, self._preparer.intake.download(remote, asked.cache_salt))

    def _prepare(self, asked: ChatRequest, downloaded: Downloaded) -> PreparedRequest:
        overrides: dict[str, Any] = {}
        if asked.do_pan_and_scan is not None:
            overrides["do_pan_and_scan"] = asked.do_pan_and_scan
        params = asked.to_sampling_params(self._preparer.sampling_defaults)
        terms = (asked.cache_salt, asked.priority or 0, asked.shown_tools)
        return self._preparer.prepare_chat(asked.messages, params, overrides, *terms, downloaded)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model_name):
            raise ModelNotFoundError("model", f"{name!r} is not served here, {self._model_name!r} is")


def create_app(preparer: RequestPreparer, engine: Engine, model_name: str) -> Starlette:
    api = Api(preparer, engine, model_name)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{model:path}", api.model),
            Route("/health", api.health),
            Route("/version", api.version),
            *page_routes(),
        ],
        exception_handlers={
            InvalidArgumentError: _refuse,
            RequestFailedError: _answer_failed_request,
            HTTPException: _refuse_http,
            ClientDisconnect: _note_client_left,
            Exception: _fail,
        },
    )


async def _chain(first: bytes, others: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for each in others:
        yield each


async def _read_body(http: Request) -> bytes:
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError("body", f"exceeds {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _unless_client_leaves(http: Request, work: Awaitable[Answer]) -> Answer:
    """Abandons the work of a client that is gone.  Only streams notice that by themselves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(http.receive())  # the body is read, so nothing else can come
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _note_client_left(http: Request, _error: Exception) -> Response:
    logger.info("%s %s: the client left", http.method, http.url.path)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _refuse(_http: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidArgumentError)
    return _json(ErrorResponse.of(error), status=error.status)


async def _answer_failed_request(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestFailedError)
    logger.log(logging.INFO if error.is_refusal else logging.ERROR, "%s %s: %s", http.method, http.url.path, error)
    headers = RETRY_LATER if isinstance(error, EngineLostError) else None
    return _json(ErrorResponse.of(error), status=error.status, headers=headers)


async def _refuse_http(_http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = ErrorDetail(message=error.detail, type="invalid_request_error")
    return _json(ErrorResponse(error=detail), status=error.status_code, headers=error.headers)


async def _fail(http: Request, _error: Exception) -> Response:
    logger.error("%s %s failed", http.method, http.url.path)  # uvicorn logs the traceback
    return _json(SERVER_FAILED, status=500)


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, JSONResponse.media_type)
