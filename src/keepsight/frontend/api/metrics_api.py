"""Endpoints that report on the server: `/metrics` for Prometheus, and for administrators its state and last requests.

Any frontend reports on all of them. Engines are not queried: the numbers are in in-memory files, which are read off
the event loop.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from keepsight.frontend.api.answer import Engine
from keepsight.frontend.api.read_list_query import read_limit, refuse_unknown_parameters
from keepsight.frontend.http.error_response import json_response
from keepsight.observe.account import AccountBody
from keepsight.observe.catalogue import (
    CACHES,
    DECODED,
    ENCODED,
    FETCHED,
    PREPROCESSED,
    TRANSFERRED,
    CacheSlots,
    slot_of,
)
from keepsight.observe.server_view import ServerView
from keepsight.observe.totals import Totals
from keepsight.observe.write_prometheus import CONTENT_TYPE, write_prometheus
from keepsight.requests import TierStatus

DEFAULT_LIMIT, MAX_LIMIT = 50, 1000
RUNNING, WAITING = slot_of("num_requests_running"), slot_of("num_requests_waiting")


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """One cache in one tier, for all engines and modalities. The prefix cache counts queries and hits in tokens."""

    cache: str
    tier: str
    queries: int
    hits: int
    evictions: int
    saved_seconds: float
    bytes: int
    # 0 if the cache is switched off, or its budget is managed elsewhere (Redis).
    budget_bytes: int
    entries: int
    # Why an engine has set it aside, if one has.
    reason: str | None


class MediaWork(msgspec.Struct, frozen=True):
    """Work actually done since the server was started."""

    fetched: int
    decoded: int
    preprocessed: int
    transferred: int
    encoded: int


# The metrics of the fields of `MediaWork`, in their order.
WORK = (FETCHED, DECODED, PREPROCESSED, TRANSFERRED, ENCODED)


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    # Sequences with a seat, and without.
    running: int
    waiting: int
    caches: list[CacheState]
    media: MediaWork
    # Total resident bytes of the processes of each kind.
    memory: dict[str, int]
    # Requests that have ended, latest first.
    requests: list[AccountBody]


class AccountList(msgspec.Struct, frozen=True):
    data: list[AccountBody]


class MetricsApi:
    def __init__(self, view: ServerView, engine: Engine) -> None:
        self._view, self._engine = view, engine

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self.metrics),
            Route("/debug/state", self.state),
            Route("/debug/requests", self.requests),
            Route("/debug/requests/{id}", self.request),
        ]

    async def metrics(self, _http: Request) -> Response:
        totals = await run_in_threadpool(self._view.read_totals)
        return Response(write_prometheus(totals), headers={"content-type": CONTENT_TYPE})

    async def state(self, http: Request) -> Response:
        limit = _read_limit(http)
        totals = await run_in_threadpool(self._view.read_totals)
        accounts = await run_in_threadpool(self._view.read_accounts)
        running, waiting = _whole(totals, RUNNING, WAITING)
        return json_response(
            ServerState(
                running=running,
                waiting=waiting,
                caches=list(_describe_caches(totals, self._engine.list_tiers())),
                media=MediaWork(*(int(totals.sum(each)) for each in WORK)),
                memory=dict(totals.memory),
                requests=accounts[:limit],
            )
        )

    async def requests(self, http: Request) -> Response:
        limit = _read_limit(http)
        accounts = await run_in_threadpool(self._view.read_accounts)
        return json_response(AccountList(accounts[:limit]))

    async def request(self, http: Request) -> Response:
        """Return the accounts of one request: one for each of its prompts."""
        request_id = http.path_params["id"]
        accounts = await run_in_threadpool(self._view.read_accounts)
        found = [account for account in accounts if account.id == request_id]
        if not found:
            raise HTTPException(404, f"request {request_id!r} is not among the last that ended")
        return json_response(AccountList(found))


def _read_limit(http: Request) -> int:
    refuse_unknown_parameters(http, ("limit",))
    return read_limit(http, DEFAULT_LIMIT, MAX_LIMIT)


def _describe_caches(totals: Totals, tiers: Mapping[int, Sequence[TierStatus]]) -> Iterator[CacheState]:
    """`tiers`: by engine rank."""
    for cache, tier in CACHES:
        slots = CacheSlots.of(cache, tier)
        evictions, num_bytes, budget, entries = _whole(
            totals, slots.evictions, slots.num_bytes, slots.budget_bytes, slots.entries
        )
        own = [each for statuses in tiers.values() for each in statuses if (each.cache, each.name) == (cache, tier)]
        reasons = [each.reason for each in own if each.reason]
        yield CacheState(
            cache=cache,
            tier=tier,
            queries=int(totals.sum(slots.queries)),
            hits=int(totals.sum(slots.hits)),
            evictions=evictions,
            saved_seconds=round(totals.sum(slots.saved_seconds), 6),
            bytes=num_bytes,
            budget_bytes=budget,
            entries=entries,
            reason=reasons[0] if reasons else None,
        )


def _whole(totals: Totals, *slots: int) -> list[int]:
    return [int(totals.numbers[slot]) for slot in slots]
