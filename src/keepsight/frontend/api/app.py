"""The HTTP API: routes, reading of bodies, error responses. The work of an endpoint is in the modules it calls."""

import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import quote

import msgspec
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp

from keepsight import __version__
from keepsight.api_settings import ApiSettings
from keepsight.errors import AnsweredError, RequestFailedError
from keepsight.frontend.api.access import Access, isolate_salt, may_watch, path_within, tenant_of
from keepsight.frontend.api.answer import Answer, Engine
from keepsight.frontend.api.answer_embeddings import EmbeddingsAnswer
from keepsight.frontend.api.answer_responses import ResponsesAnswer
from keepsight.frontend.api.chat_request import ChatRequest, parse_chat_request
from keepsight.frontend.api.completion_request import parse_completion_request
from keepsight.frontend.api.embeddings_request import parse_embeddings_request
from keepsight.frontend.api.files_api import FilesApi
from keepsight.frontend.api.held_pictures import HeldPictures
from keepsight.frontend.api.kept_responses import KeptResponses
from keepsight.frontend.api.media_api import NOTHING_USED, MediaApi, UsedMedia
from keepsight.frontend.api.message_object import MessageTokens
from keepsight.frontend.api.messages_request import parse_count_tokens_request, parse_messages_request
from keepsight.frontend.api.metrics_api import MetricsApi
from keepsight.frontend.api.openapi import describe_api
from keepsight.frontend.api.pixel_pins import PixelPins
from keepsight.frontend.api.prepare_answer import AnswerPreparer, Client
from keepsight.frontend.api.prompt_fields import PromptFields
from keepsight.frontend.api.redirect_slashes import RedirectSlashes
from keepsight.frontend.api.request_log import CLIENT_CLOSED_REQUEST, RequestLog, format_request_line
from keepsight.frontend.api.response_object import InputTokens
from keepsight.frontend.api.responses_api import ResponsesApi
from keepsight.frontend.api.responses_request import ResponsesChat, ResponsesRequest, parse_responses_request
from keepsight.frontend.api.serve_page import page_routes
from keepsight.frontend.api.served_models import ServedModels
from keepsight.frontend.api.tokenize_request import parse_detokenize_request, parse_tokenize_request
from keepsight.frontend.http.decode_body import Buffer
from keepsight.frontend.http.error_response import (
    RETRY_LATER,
    SERVER_FAILED,
    ErrorDetail,
    ErrorResponse,
    error_response,
    fault_response,
    json_response,
)
from keepsight.frontend.http.event_stream import EventStream
from keepsight.frontend.http.other_servers import propose_path
from keepsight.frontend.http.read_body import reading_body
from keepsight.frontend.http.request_id import HEADERS as REQUEST_ID_HEADERS
from keepsight.frontend.http.unless_client_leaves import unless_client_leaves
from keepsight.frontend.http.waiting_room import WaitingRoom
from keepsight.frontend.intake.media_handles import MediaHandles
from keepsight.frontend.intake.media_intake import NOTHING_DOWNLOADED, Downloaded
from keepsight.frontend.pixels.pixel_cache import PixelCache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.read_messages import Conversation
from keepsight.observe.counters import Counters
from keepsight.observe.format_account import format_for_header
from keepsight.observe.server_view import ServerView

logger = logging.getLogger(__name__)
# Limit on all bodies being read or prepared at once, as a multiple of the largest body allowed.
MAX_LARGEST_BODIES = 16
# Resets under way at once; others wait for them.
MAX_RESETS = 2
# Bytes. Larger bodies that may hold token ids are parsed in a thread: each id is checked, which takes seconds for the
# largest.
MAX_TOKEN_IDS_ON_LOOP = 2**18
DEFAULT_SETTINGS = ApiSettings()
SEES_NOTHING = ServerView()
KEEPS_NOTHING = PixelCache()
ParsedRequest = TypeVar("ParsedRequest", bound=msgspec.Struct)
# An answer, and what is to be recorded of its media once it has begun.
_Prepared = tuple[Answer | EmbeddingsAnswer, UsedMedia]
_Prepare = Callable[[Request, Buffer], Awaitable[_Prepared]]


class Api:
    def __init__(
        self,
        preparer: RequestPreparer,
        engine: Engine,
        model_name: str,
        settings: ApiSettings,
        handles: MediaHandles | None,
        kept: KeptResponses | None,
        pixel_cache: PixelCache,
        digests: Mapping[str, str] | None = None,
    ) -> None:
        """`digests`: of what is served, for a router that compares servers."""
        self._digests = {} if digests is None else {"serves": digests}
        self._preparer, self._engine, self._settings = preparer, engine, settings
        self.served = ServedModels(model_name, settings, preparer)
        self._answers = AnswerPreparer(preparer, self.served, settings.trust_request_mm_processor_kwargs)
        self._room = WaitingRoom(settings.max_waiting_requests, MAX_LARGEST_BODIES * settings.max_body_bytes)
        self.pins = PixelPins(handles, pixel_cache)
        self.media: MediaApi | None = None
        self.files: FilesApi | None = None
        if handles is not None:
            salt_of = partial(isolate_salt, settings)
            self.media = MediaApi(preparer, engine, handles, pixel_cache, self.pins, self._admit_body, salt_of)
            self.files = FilesApi(self.media, handles, self._admit_body)
        # Resets wait for all engines, for up to half a minute; they must not take the threads of other requests.
        self._resets = CapacityLimiter(MAX_RESETS)
        self.kept = None if kept is None else ResponsesApi(kept, self._room)

    # Answers ----------------------------------------------------------------------------------------------------

    async def answer(self, prepare: _Prepare, http: Request) -> Response:
        """Answer a generation or embeddings request."""
        with ExitStack() as waiting:
            answer, used = await self._read_and_prepare(prepare, http, waiting)
            response = await self._answer(http, answer)
            if used and self.media is not None:
                await self.media.note_uses(http, used, *answer.prompts)
            return response

    async def _read_and_prepare(self, prepare: _Prepare, http: Request, waiting: ExitStack) -> _Prepared:
        """A separate call, so that nothing holds the request's body during the answer, possibly for minutes."""
        async with self._reading_body(http) as body:
            waiting.enter_context(self._room.admit())
            return await prepare(http, body)

    async def prepare_chat(self, parse: Callable[[Buffer], ChatRequest], http: Request, body: Buffer) -> _Prepared:
        return await self._prepare_messages(http, parse(body), len(body))

    async def prepare_response(self, http: Request, body: Buffer) -> _Prepared:
        request = parse_responses_request(body)
        async with self._continuing(http, request) as (chat, num_bytes):
            answer, used = await self._prepare_messages(http, chat, len(body) + num_bytes)
        assert isinstance(answer, ResponsesAnswer)
        if self.kept is not None and request.store is not False:
            self.kept.keep(http, body, answer)
        return answer, used

    @asynccontextmanager
    async def _continuing(
        self, http: Request, request: ResponsesRequest
    ) -> AsyncGenerator[tuple[ResponsesChat, int], None]:
        """Yield the request as a chat that continues the conversation it names, and that conversation's bytes."""
        if self.kept is None:
            request.check_stores_nothing()
        else:
            request = msgspec.structs.replace(request, input=await self.kept.resolve(http, request.input))
        if self.kept is None or request.previous_response_id is None:
            yield request.as_chat(), 0
            return
        async with self.kept.reading_before(http, request.previous_response_id) as (before, num_bytes):
            yield request.as_chat(before), num_bytes

    async def _prepare_messages(self, http: Request, request: ChatRequest, num_bytes: int) -> _Prepared:
        """`num_bytes`: size of what the messages were read from."""
        salt, downloaded = await self._fetch(http, request)
        answer = await self._answers.chat(request, salt, downloaded, num_bytes, Client(tenant_of(http), http.receive))
        return answer, await self._pin_handles(http, request.messages, *answer.prompts)

    async def _pin_handles(self, http: Request, messages: Conversation, prepared: PreparedRequest) -> UsedMedia:
        if self.media is None:
            return NOTHING_USED
        with prepared.free_names_if_refused():
            return await self.media.pin_handles(http, messages.pictures)

    async def prepare_completion(self, http: Request, body: Buffer) -> _Prepared:
        request = await _parse(parse_completion_request, body)
        self.served.check(request.model)
        salt = isolate_salt(self._settings, http, request.cache_salt)
        return await self._answers.completion(request, salt, Client(tenant_of(http), http.receive)), NOTHING_USED

    async def prepare_embeddings(self, http: Request, body: Buffer) -> _Prepared:
        request = await _parse(parse_embeddings_request, body)
        salt, downloaded = await self._fetch(http, request)
        answer = await self._answers.embeddings(request, salt, downloaded)
        if request.messages is None:
            return answer, NOTHING_USED
        return answer, await self._pin_handles(http, request.messages, *answer.prompts)

    async def _answer(self, http: Request, answer: Answer | EmbeddingsAnswer) -> Response:
        http.state.answer = answer
        answer.name_accounts(http.state.request_id, http.state.began, http.headers.get("traceparent"))
        if (seconds := getattr(http.state, "download_seconds", None)) is not None:
            answer.accounts[0].note_download(seconds)
        response: Response
        if isinstance(answer, Answer) and answer.is_streamed:
            events = answer.events(self._engine)
            # A failure before the first token still gets an HTTP status of its own.
            response = EventStream(await unless_client_leaves(http.receive, anext(events)), events)
        else:
            response = json_response(await unless_client_leaves(http.receive, answer.whole(self._engine)))
        # The stages known by now: for a stream, those before its first token.
        response.headers["server-timing"] = format_for_header(answer.accounts)
        return response

    async def _fetch(self, http: Request, request: ChatRequest | PromptFields) -> tuple[str | None, Downloaded]:
        """Return the request's salt, and the downloads of its pictures' URLs."""
        self.served.check(request.model)
        salt = isolate_salt(self._settings, http, request.cache_salt)
        downloaded = (
            NOTHING_DOWNLOADED if request.messages is None else await self._download(http, request.messages, salt)
        )
        return salt, downloaded

    async def _download(self, http: Request, conversation: Conversation, cache_salt: str | None) -> Downloaded:
        """Download before the request takes a thread: a slow origin must not occupy one."""
        downloaded = NOTHING_DOWNLOADED
        if remote := self._preparer.pictures_to_download(conversation):
            if self.media is not None:
                await self.media.check_named(http, conversation.pictures)
            began = time.monotonic()
            downloaded = await unless_client_leaves(http.receive, self._preparer.intake.download(remote, cache_salt))
            http.state.download_seconds = time.monotonic() - began
        if self.media is not None:
            downloaded = {**downloaded, **await self.media.read_named(http, conversation.pictures)}
        return downloaded

    # Bodies -----------------------------------------------------------------------------------------------------

    def _reading_body(self, http: Request) -> AbstractAsyncContextManager[Buffer]:
        return reading_body(http, self._room, self._settings.max_body_bytes, self._settings.slow_client_seconds)

    @asynccontextmanager
    async def _admit_body(self, http: Request) -> AsyncGenerator[Buffer, None]:
        async with self._reading_body(http) as body:
            with self._room.admit():
                yield body

    # Tokens -----------------------------------------------------------------------------------------------------

    async def tokenize(self, http: Request) -> Response:
        async with self._admit_body(http) as body:
            request = parse_tokenize_request(body)
            return json_response(await self._answers.tokenize(request, *await self._fetch(http, request)))

    async def count_input(self, http: Request) -> Response:
        admitted = self._admit_body(http)
        async with admitted as body, self._continuing(http, parse_responses_request(body)) as (chat, _):
            return json_response(InputTokens(input_tokens=await self._count(http, chat)))

    async def count_message(self, http: Request) -> Response:
        async with self._admit_body(http) as body:
            num_tokens = await self._count(http, parse_count_tokens_request(body))
            return json_response(MessageTokens(input_tokens=num_tokens))

    async def _count(self, http: Request, request: ChatRequest) -> int:
        return await self._answers.count_input(request, *await self._fetch(http, request))

    async def detokenize(self, http: Request) -> Response:
        async with self._admit_body(http) as body:
            request = parse_detokenize_request(body)
            self.served.check(request.model)
            return json_response(await run_in_threadpool(self._answers.detokenize, request))

    # The server -------------------------------------------------------------------------------------------------

    async def health(self, http: Request) -> Response:
        """Report that the process is alive. Details of requests and tiers are only for those who may watch."""
        shows_all = may_watch(self._settings, http)
        tiers = [
            {
                "engine": rank,
                "status": "ok" if tier.reason is None else "set aside",
                **(dataclasses.asdict(tier) if shows_all else {"cache": tier.cache, "name": tier.name}),
            }
            for rank, tiers in self._engine.list_tiers().items()
            for tier in tiers
        ]
        numbers = {"engines": self._engine.num_engines, "silent_engines": self._engine.num_silent_engines}
        health: dict[str, object] = {"status": self._status, **numbers}
        if shows_all:
            health["requests"] = self._room.num_requests
        return json_response({**health, "tiers": tiers} if tiers else health)

    async def ready(self, _http: Request) -> Response:
        status = self._status
        body = {"status": status, **self._digests}
        return json_response(body) if status == "ok" else json_response(body, 503, RETRY_LATER)

    @property
    def _status(self) -> str:
        """The state that a request would find now. (A server that is shutting down accepts none.)"""
        if not self._engine.num_engines:
            return "the engine is being started again"
        if self._engine.num_silent_engines == self._engine.num_engines:
            return "the engine gives no sign of life"
        return "ok" if self._room.has_room else "overloaded"

    async def version(self, _http: Request) -> Response:
        return json_response({"version": __version__})

    async def openapi(self, _http: Request) -> Response:
        kept = {"has_uploads": self.media is not None, "keeps_responses": self.kept is not None}
        return json_response(describe_api(self._settings, **kept))

    # For administrators -----------------------------------------------------------------------------------------

    async def reset(self, _http: Request, **caches: bool) -> Response:
        # Freeing gigabytes of pixels takes about a second.
        await to_thread.run_sync(partial(self._engine.reset_caches, **caches), limiter=self._resets)
        return json_response({})


async def _parse(parse: Callable[[Buffer], ParsedRequest], body: Buffer) -> ParsedRequest:
    if len(body) <= MAX_TOKEN_IDS_ON_LOOP:
        return parse(body)
    return await run_in_threadpool(parse, body)


def create_app(
    preparer: RequestPreparer,
    engine: Engine,
    model_name: str,
    settings: ApiSettings = DEFAULT_SETTINGS,
    handles: MediaHandles | None = None,
    pixel_cache: PixelCache = KEEPS_NOTHING,
    view: ServerView = SEES_NOTHING,
    counters: Counters | None = None,
    kept: KeptResponses | None = None,
    digests: Mapping[str, str] | None = None,
) -> ASGIApp:
    """Create the ASGI app.

    Without `handles` nothing can be uploaded; without `kept` no request can continue an earlier response. The pictures
    in `pixel_cache` are shown only if the settings say so.
    """
    api = Api(preparer, engine, model_name, settings, handles, kept, pixel_cache, digests)
    more_routes = [] if api.media is None else api.media.routes
    more_routes += [] if api.files is None else api.files.routes
    more_routes += [] if api.kept is None else api.kept.routes
    if settings.dashboard_thumbnails:
        more_routes += HeldPictures(pixel_cache, api.pins).routes
    app = Starlette(
        routes=[*_routes(api), *more_routes, *MetricsApi(view, engine).routes, *page_routes()],
        middleware=_middleware(settings),
        exception_handlers={
            AnsweredError: _refuse,
            RequestFailedError: _answer_failed_request,
            HTTPException: _refuse_http,
            ClientDisconnect: _end_abandoned,
            Exception: _fail,
        },
    )
    app.router.default = RedirectSlashes(app.router)
    return RequestLog(app, settings.log_requests, counters or Counters())


def _routes(api: Api) -> list[Route]:
    """Return the routes, each of which is described in `openapi.py`."""
    post = partial(Route, methods=["POST"])
    return [
        post("/v1/chat/completions", partial(api.answer, partial(api.prepare_chat, parse_chat_request))),
        post("/v1/completions", partial(api.answer, api.prepare_completion)),
        post("/v1/embeddings", partial(api.answer, api.prepare_embeddings)),
        post("/v1/responses", partial(api.answer, api.prepare_response)),
        post("/v1/responses/input_tokens", api.count_input),
        post("/v1/messages", partial(api.answer, partial(api.prepare_chat, parse_messages_request))),
        post("/v1/messages/count_tokens", api.count_message),
        post("/tokenize", api.tokenize),
        post("/detokenize", api.detokenize),
        post("/reset_prefix_cache", partial(api.reset, prefix=True)),
        post("/reset_encoder_cache", partial(api.reset, encoder=True)),
        post("/reset_mm_cache", partial(api.reset, processor=True)),
        *api.served.routes,
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/version", api.version),
        Route("/openapi.json", api.openapi),
    ]


def _middleware(settings: ApiSettings) -> list[Middleware]:
    """Return the middleware, outermost first: CORS comes first, as browsers send preflight requests without a key."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,  # browsers ask this of servers at private addresses, for pages of the internet
        expose_headers=(*REQUEST_ID_HEADERS, "Retry-After", "Server-Timing"),
    )
    access = Middleware(Access, settings=settings)
    return [cors, access] if settings.allowed_origins else [access]


async def _end_abandoned(_http: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _refuse(http: Request, error: Exception) -> Response:
    assert isinstance(error, AnsweredError)
    return error_response(error, http.scope)


async def _answer_failed_request(http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestFailedError)
    logger.log(logging.INFO if error.is_refusal else logging.ERROR, "%s: %s", format_request_line(http.scope), error)
    return error_response(error, http.scope)


async def _refuse_http(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if message == HTTPStatus(error.status_code).phrase:  # the router's text: clients show neither method nor path
        path, root = path_within(http.scope)[:80], http.scope.get("root_path", "")
        meant = propose_path(path, [route.path for route in http.app.routes]) if error.status_code == 404 else None
        hint = f"did you mean {root}{meant}? " if meant else ""
        message = f"{http.method} {root}{quote(path)}: {message}; {hint}GET {root}/openapi.json lists all paths"
    detail = ErrorDetail(message=message, type="invalid_request_error")
    headers = {"Allow": _allowed_at(http)} if error.status_code == 405 else error.headers
    return fault_response(ErrorResponse(error=detail), error.status_code, http.scope, headers)


def _allowed_at(http: Request) -> str:
    """Return the methods allowed by all routes of the path; the router names only those of the first."""
    found = (route.methods for route in http.app.routes if route.matches(http.scope)[0] is not Match.NONE)
    return ", ".join(sorted(set().union(*found)))


async def _fail(http: Request, _error: Exception) -> Response:
    logger.error("%s failed", format_request_line(http.scope))  # uvicorn logs the traceback
    return fault_response(SERVER_FAILED, 500, http.scope)
