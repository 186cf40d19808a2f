"""One request to an OpenAI server, timed from its first byte on an open connection to the end of its answer.

Events are only recorded as they arrive; they are parsed afterwards, when no clock runs.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from keepsight.bench.address import Address
from keepsight.bench.event_stream import DONE, EventReader
from keepsight.bench.http_connection import Response, connecting
from keepsight.bench.read_refusal import failure_in, failure_of, read_refusal
from keepsight.errors import NoAnswerError

T = TypeVar("T")

LIMIT_SECONDS = 1800.0
_PATH = "/chat/completions"
# Fields with text of the answer, and of the reasoning before it, whose name is not standardized.
_TEXTS = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class Server:
    address: Address
    model: str
    api_key: str | None = None
    # Sampling fields of the request's body: max_tokens, temperature, ...
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def for_one_token(self) -> Self:
        """Return the same server, asked for answers of one token."""
        return replace(self, sampling={**self.sampling, "max_tokens": 1})

    def body(self, messages: Sequence[bytes]) -> bytes:
        fields = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **self.sampling}
        return b'{"messages":[%s],%s' % (b",".join(messages), json.dumps(fields).encode()[1:])


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are in seconds since the request began; with an `error`, the other fields have no meaning."""

    seconds: float
    token_times: Sequence[float] = ()
    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    # None: the server does not report it.
    num_cached_tokens: int | None = None
    error: str | None = None


async def ask(server: Server, messages: Sequence[bytes]) -> Answer:
    """Send a request and time its answer. Any failure is the answer's `error`: failing servers are measured, too."""
    body = server.body(messages)
    started = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_SECONDS), connecting(server.address) as connection:
            started = time.perf_counter()
            response = await connection.post(_PATH, body, server.headers)
            if response.status != 200:
                url = server.address.url + _PATH
                raise NoAnswerError(read_refusal(response.status, await response.read(), url))
            events, is_done = await _note_events(response)
            seconds = time.perf_counter() - started
            return _understand([(when - started, json.loads(data)) for when, data in events], seconds, is_done)
    except EOFError:
        return Answer(time.perf_counter() - started, error="the connection ended before the answer did")
    except (OSError, ValueError, LookupError, RecursionError, NoAnswerError) as error:
        return Answer(time.perf_counter() - started, error=str(error) or type(error).__name__)


def _is_stream(response: Response) -> bool:
    """Return whether the answer is a stream of events; one whose type is not given counts as one."""
    return "text/event-stream" in response.headers.get("content-type", "text/event-stream").lower()


async def _note_events(response: Response) -> tuple[list[tuple[float, bytes]], bool]:
    """Return the events with their times, and whether they ended with [DONE]."""
    reader, body = EventReader(), bytearray()
    events: list[tuple[float, bytes]] = []
    async for piece in response.pieces():
        now = time.perf_counter()
        if not events:
            body += piece
        for data in reader.feed(piece):
            if data == DONE:
                return events, True
            events.append((now, data))
    if not events:
        if (error := failure_in(body)) is not None:
            raise NoAnswerError(error)
        if not _is_stream(response):
            raise NoAnswerError(f"the answer is not streamed, but {response.headers['content-type']}")
    return events, False


def _understand(events: Sequence[tuple[float, Any]], seconds: float, is_done: bool) -> Answer:
    try:
        return _read(events, seconds, is_done)
    except (AttributeError, LookupError, TypeError) as error:
        raise NoAnswerError(f"an event is not in OpenAI's format: {error}") from error


def _read(events: Sequence[tuple[float, dict[str, Any]]], seconds: float, is_done: bool) -> Answer:
    times: list[float] = []
    end_times: list[float] = []
    texts: list[str] = []
    usage: Mapping[str, Any] = {}
    for when, event in events:
        if (error := failure_of(event)) is not None:
            raise NoAnswerError(error)
        usage = event.get("usage") or usage
        # An event may have no choice: the usage, or a sign of life.
        for choice in event.get("choices") or ():
            delta = choice.get("delta", {})
            # Not every server also sends [DONE], and some send an empty reason before the end.
            is_end = bool(choice.get("finish_reason"))
            is_done = is_done or is_end
            texts.append(delta.get("content") or "")
            if is_end and not _has_text(delta):
                end_times.append(when)
            elif "delta" in choice and _is_token(delta):
                times.append(when)
    if not is_done:
        raise EOFError
    if not (times or end_times):
        raise NoAnswerError("the answer has no token")
    details = usage.get("prompt_tokens_details") or {}
    num_tokens = _count(usage, "completion_tokens", len(times) or 1)
    # An end without text is a token only if the server counts just one more: most send it right after the last token,
    # and some send several tokens per event.
    if not times or num_tokens == len(times) + 1:
        times += end_times[:1]
    return Answer(
        seconds,
        times[: max(1, num_tokens)],
        "".join(texts),
        num_tokens,
        _count(usage, "prompt_tokens", 0),
        _count(details, "cached_tokens", None),
    )


def _count(usage: Mapping[str, Any], name: str, unreported: T) -> int | T:
    value = usage.get(name)
    if value is None:
        return unreported
    # Some servers write whole numbers with a fraction of zero.
    if not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise TypeError(f"{value!r} is not a number of tokens")
    return int(value)


def _is_token(delta: Mapping[str, Any]) -> bool:
    """Return False for the opening event, which some servers send before any token; a token may have no text."""
    return _has_text(delta) or "role" not in delta


def _has_text(delta: Mapping[str, Any]) -> bool:
    return any(delta.get(name) for name in _TEXTS)
