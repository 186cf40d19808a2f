"""A client of an OpenAI server: its models, and the answer to a request, piece by piece.

Knows HTTP and server-sent events, nothing of conversations or terminals. Uses only the standard library, so that it
starts at once and has no dependencies. Every failure is raised as a `NoAnswerError`.
"""

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from keepsight import __version__
from keepsight.bench.address import Address
from keepsight.bench.event_stream import DONE, LineReader
from keepsight.bench.read_refusal import KEY_VARIABLE, UNREADABLE, failure_in, failure_of, read_refusal
from keepsight.errors import InvalidArgumentError, NoAnswerError

DEFAULT_URL = "http://127.0.0.1:8000/v1"
CONNECT_SECONDS = 10.0


def choose_api_key(given: str | None) -> str | None:
    """Return `given`, the value of `--api-key`, or else the environment's key. Errors never show it."""
    name = "--api-key" if given else KEY_VARIABLE
    # Strip the newline of a key that came from a file or a command.
    key = (given or os.environ.get(KEY_VARIABLE, "")).strip()
    if not (key.isascii() and key.isprintable()):
        raise InvalidArgumentError(name, "must be printable ASCII, or no header can carry it")
    return key or None


@dataclass(frozen=True)
class Usage:
    """Token counts; None if the server did not report one."""

    num_tokens: int | None
    num_prompt_tokens: int | None
    num_cached_tokens: int | None

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> "Usage":
        details = usage.get("prompt_tokens_details") or {}
        return cls(usage.get("completion_tokens"), usage.get("prompt_tokens"), details.get("cached_tokens"))


@dataclass(frozen=True)
class Thought:
    """A piece of the reasoning before the answer."""

    text: str


class Cut:
    """The answer was cut at the token limit."""


Piece = str | Thought | Cut | Usage


class OpenAIServer:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._address = Address.parse(url, "--url")
        self._headers = {"Content-Type": "application/json", "User-Agent": f"keepsight/{__version__}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def first_model(self) -> str:
        with self._asking("GET", "/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (*UNREADABLE, LookupError, TypeError) as error:
                raise NoAnswerError(
                    f"{self.url} has no model, or is not an OpenAI server; name a model with --model"
                ) from error

    def answer(self, request: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Yield the reasoning and the text as they arrive, `Cut` if it was cut, and the usage if the server reports it.

        Closing the generator ends the answer.
        """
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        with self._asking("POST", "/chat/completions", json.dumps(body).encode()) as response:
            for event in _read_events(response):
                yield from _understand(event)

    @contextmanager
    def _asking(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        address = self._address
        connection_class = HTTPSConnection if address.is_secure else HTTPConnection
        try:
            with closing(connection_class(address.host, address.port, timeout=CONNECT_SECONDS)) as connection:
                connection.connect()
                connection.sock.settimeout(None)  # a long prompt takes as long as it takes
                connection.request(method, address.path + path, body, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise NoAnswerError(read_refusal(response.status, response.read(), address.url + path))
                yield response
        except ConnectionRefusedError as error:
            raise NoAnswerError(f"nothing answers at {self.url}", is_unreachable=True) from error
        except (OSError, HTTPException, ValueError) as error:
            raise NoAnswerError(f"{self.url}: {error or type(error).__name__}", is_unreachable=True) from error


def _read_events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each event. Only line feeds end lines: texts may hold Unicode's other line separators."""
    lines, others, is_whole = LineReader(), bytearray(), False
    for line in response:
        if (data := lines.data_of(line)) == DONE:
            return
        if not data:
            others += line
            continue
        event = _parse(data)
        if (error := failure_of(event)) is not None:
            raise NoAnswerError(error)
        yield event
        # Not every server also sends [DONE].
        is_whole = is_whole or any(choice.get("finish_reason") for choice in (event.get("choices") or [])[:1])
    if not is_whole:
        raise NoAnswerError(failure_in(others) or "the connection ended before the answer did")


def _understand(event: Mapping[str, Any]) -> list[Piece]:
    pieces: list[Piece] = []
    try:
        if choices := event.get("choices"):
            delta = choices[0].get("delta", {})
            # The name of the reasoning's field is not standardized.
            thought, text = delta.get("reasoning_content") or delta.get("reasoning") or "", delta.get("content") or ""
            for each in (thought, text):
                if not isinstance(each, str):
                    raise TypeError(f"{each!r} is no text")
            pieces += [Thought(thought), text] if thought else [text]
            if choices[0].get("finish_reason") == "length":
                pieces.append(Cut())
        if usage := event.get("usage"):
            pieces.append(Usage.of(usage))
    except (AttributeError, LookupError, TypeError) as error:
        raise NoAnswerError(f"the server sent {json.dumps(event)[:80]}, which is not part of an answer") from error
    return pieces


def _parse(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except UNREADABLE as error:
        raise NoAnswerError(f"the server sent {data[:80]!r}, which is not JSON") from error
    if not isinstance(event, dict):
        raise NoAnswerError(f"the server sent {data[:80]!r}, which is not an event")
    return event
