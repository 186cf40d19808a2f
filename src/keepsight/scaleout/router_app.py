"""The router as an ASGI app: what it answers itself, what it asks all servers, and what it forwards to one of them."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keepsight.api_settings import ApiSettings
from keepsight.errors import AnsweredError, NoReplicaError, NoSuchPathError
from keepsight.frontend.http.decode_body import Buffer
from keepsight.frontend.http.error_response import RETRY_LATER, error_response, json_response
from keepsight.frontend.http.read_body import reading_body
from keepsight.frontend.http.request_id import choose_request_id, id_headers
from keepsight.frontend.http.shown_key import shown_key
from keepsight.frontend.http.unless_client_leaves import unless_client_leaves
from keepsight.frontend.http.waiting_room import WaitingRoom
from keepsight.observe.write_prometheus import CONTENT_TYPE, write_families
from keepsight.scaleout.affinity import find_affinity
from keepsight.scaleout.forward import NONE_READY, Forwarder
from keepsight.scaleout.merge_lists import LIST_PATHS, merge_lists, read_page
from keepsight.scaleout.pass_on import keep_end_to_end, pass_on
from keepsight.scaleout.replica import Answer, Question, Replica, WholeAnswer
from keepsight.scaleout.replicas import Replicas
from keepsight.scaleout.router_meter import RouterMeter

# Servers have limits of their own, and refuse what is too much for them: this one only bounds the memory.
MAX_WAITING_REQUESTS = 2**14
# Of all bodies that are held at once, as a multiple of the largest body allowed.
MAX_LARGEST_BODIES = 16
# Larger bodies are looked through in a thread.
MAX_BYTES_ON_LOOP = 2**18
# They go to all servers.
RESET_PATHS = frozenset({"/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache"})
# What the router does with these headers itself.
_OWN_HEADERS = frozenset({b"content-length", b"expect"})
# By it servers know that a request need not come from their own machine.
_VIA = (b"via", b"1.1 keepsight")


class Router:
    def __init__(self, replicas: Replicas, settings: ApiSettings) -> None:
        self._replicas, self._settings, self._meter = replicas, settings, RouterMeter()
        self._forwarder = Forwarder(replicas, self._meter)
        self._room = WaitingRoom(MAX_WAITING_REQUESTS, MAX_LARGEST_BODIES * settings.max_body_bytes)
        self._own: dict[str, Callable[[], Response]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        # The latter if it takes too long to finish as the router shuts down.
        with suppress(ClientDisconnect, asyncio.CancelledError):
            try:
                await self._answer(http, send)
            except AnsweredError as error:
                self._meter.note_refusal(error)
                await _say(error_response(error, scope), http, send)

    async def _answer(self, http: Request, send: Send) -> None:
        path = http.scope["path"]
        if (own := self._own.get(path)) is not None:
            await _say(own(), http, send)
            return
        if path == "/dashboard" or path.startswith("/debug/"):
            raise NoSuchPathError(f"each server behind this address has a {path[:80]} of its own", "no_such_path")
        answer = await self._find_answer(http)
        with closing(answer):
            await unless_client_leaves(http.receive, pass_on(answer, http.scope, send))

    async def _find_answer(self, http: Request) -> Answer | WholeAnswer:
        """Return the answer once it begins; nothing of the request is held any more."""
        settings = self._settings
        reading = reading_body(http, self._room, settings.max_body_bytes, settings.slow_client_seconds)
        async with reading as body:
            with self._room.admit():
                return await unless_client_leaves(http.receive, self._ask(http, body))

    async def _ask(self, http: Request, body: Buffer) -> Answer | WholeAnswer:
        method, path = http.method, http.scope["path"]
        question = _as_question(http.scope, body)
        if method == "POST" and path in RESET_PATHS:
            return await self._reset(question)
        if method == "GET" and path in LIST_PATHS:
            return await self._list(http, question)
        look = partial(find_affinity, path, body, shown_key(http.scope).encode())
        affinity = look() if len(body) <= MAX_BYTES_ON_LOOP else await asyncio.to_thread(look)
        return await self._forwarder.forward(question, affinity)

    async def _reset(self, question: Question) -> WholeAnswer:
        answers = await self._forwarder.ask_all(question)
        for replica, answer in answers.items():
            if answer is not None and answer.status == 200:
                replica.forget()
        if None in answers.values():
            raise NoReplicaError("a server behind this address failed, and may not have reset its caches")
        return _worst(answers)

    async def _list(self, http: Request, question: Question) -> WholeAnswer:
        answers = await self._forwarder.ask_all(question)
        if (worst := _worst(answers)).status != 200:
            return worst
        pages = [read_page(answer.body) for answer in answers.values() if answer is not None]
        return worst.with_body(msgspec.json.encode(merge_lists(http.scope["path"], http.query_params, pages)))

    # Of the router itself ---------------------------------------------------------------------------------------

    def _health(self) -> Response:
        return json_response({"status": "ok", "replicas": len(self._replicas.all), "ready": len(self._replicas.ready)})

    def _ready(self) -> Response:
        if not self._replicas.ready:
            return json_response({"status": NONE_READY}, 503, RETRY_LATER)
        return json_response({"status": "ok"})

    def _metrics(self) -> Response:
        text = write_families(self._meter.families(self._replicas))
        return Response(text, headers={"content-type": CONTENT_TYPE})


async def _say(own: Response, http: Request, send: Send) -> None:
    """Send an answer of the router itself; those of servers have the request's id already."""
    own.raw_headers += id_headers(http.scope, choose_request_id(http.scope))
    await own(http.scope, http.receive, send)


def _as_question(scope: Scope, body: Buffer) -> Question:
    headers = [each for each in keep_end_to_end(scope["headers"]) if each[0] not in _OWN_HEADERS]
    if body or scope["method"] in ("POST", "PUT", "PATCH"):
        headers.append((b"content-length", b"%d" % len(body)))
    if not any(name == b"host" for name, _ in headers):
        headers.append((b"host", b""))  # which HTTP/1.0 need not have
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    return Question(scope["method"].encode(), target, [*headers, _VIA], body)


def _worst(answers: Mapping[Replica, WholeAnswer | None]) -> WholeAnswer:
    return max((each for each in answers.values() if each is not None), key=lambda answer: answer.status)
