"""Gives each request an id, in its answer and in its log lines, and logs one line when it has ended.

Also counts answers by status: refused requests reach no other code that counts.
"""

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepsight.frontend.api.access import path_within
from keepsight.frontend.api.response_parts import Usage
from keepsight.frontend.http.request_id import choose_request_id, id_headers
from keepsight.observe.account import RequestAccount
from keepsight.observe.catalogue import RESPONSES
from keepsight.observe.counters import Counters
from keepsight.observe.format_account import format_for_log, format_media_tokens

logger = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499  # nginx's number, used only in this log: there is no answer to count
_request_id: ContextVar[str] = ContextVar("request_id", default="")
# Strangers choose it, and it may be as long as headers may.
MAX_SHOWN_PATH = 200
# Polled every few seconds by monitoring, and by the dashboard: left out, but for what is refused.
PROBES = frozenset({"/health", "/ready"})  # their 503 says how the server is, and refuses nothing
POLLED_PATHS = frozenset({"/metrics", "/debug/state"})
POLLED_IF_READ = "/debug/pictures"


def format_request_line(scope: Scope) -> str:
    """Format a request for the log, quoting its path: line breaks and terminal escapes must not forge log lines."""
    path = scope["path"]
    shown = path if len(path) <= MAX_SHOWN_PATH else path[: MAX_SHOWN_PATH - 3] + "..."
    return f"{scope['method']} {quote(shown)}"


class RequestLog:
    """ASGI middleware, the outermost."""

    def __init__(self, app: ASGIApp, logs_requests: bool, counters: Counters) -> None:
        self._app, self._logs_requests, self._counters = app, logs_requests, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _Record(scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.note_start(message["status"])
                if message["status"] != CLIENT_CLOSED_REQUEST and not _is_left_out(scope, message["status"]):
                    self._counters.add(RESPONSES[message["status"] // 100])
                message["headers"] = [*message.get("headers", ()), *id_headers(scope, record.request_id)]
            await send(message)

        before = _request_id.set(record.request_id)
        try:
            await self._app(scope, receive, send_named)
        finally:
            if self._logs_requests and not _is_left_out(scope, record.status):
                logger.info("%s", record)
            _request_id.reset(before)


def _is_left_out(scope: Scope, status: int) -> bool:
    path = path_within(scope)
    is_read = scope["method"] == "GET" and f"{path}/".startswith(f"{POLLED_IF_READ}/")
    return path in PROBES or (status < 400 and (is_read or path in POLLED_PATHS))


class RequestIdFilter(logging.Filter):
    """A filter for log handlers: prefixes messages with the id of the request being handled."""

    def filter(self, record: logging.LogRecord) -> bool:
        if request_id := _request_id.get():
            record.msg = f"[{request_id}] {record.msg}"
        return True


class _Record:
    def __init__(self, scope: Scope) -> None:
        self.request_id = choose_request_id(scope)
        self._request_line = format_request_line(scope)
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._begin = time.monotonic()
        self._state |= {"request_id": self.request_id, "began": self._begin}
        self.status, self._first_ms = 0, 0.0

    def note_start(self, status: int) -> None:
        self.status, self._first_ms = status, self._elapsed_ms()

    def __str__(self) -> str:
        line = f"{self._request_line} {self.status or 'unanswered'} in {self._elapsed_ms():.1f} ms"
        answer = self._state.get("answer")
        if answer is None:
            # What an upload or a pin asked of the engine, if anything.
            accounts = [self._state["warming"]] if "warming" in self._state else []
            return "; ".join(filter(None, (line, format_for_log(accounts))))
        parts = (
            f"{line}, {self._first_ms:.1f} to the first byte",
            _describe_usage(answer.usage, answer.accounts),
            format_for_log(answer.accounts),
        )
        return "; ".join(filter(None, parts))

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._begin) * 1e3


def _describe_usage(usage: Usage, accounts: Sequence[RequestAccount]) -> str:
    parts = f"{usage.prompt_tokens_details.cached_tokens} cached, {format_media_tokens(accounts)}"
    return f"{usage.prompt_tokens} tokens of prompt ({parts}), {usage.completion_tokens} of answer"
