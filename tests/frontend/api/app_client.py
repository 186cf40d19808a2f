"""The API in process, with the demo's frontend and a fake engine whose answers are scripted."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from starlette.types import ASGIApp

from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.app import DEFAULT_SETTINGS, create_app
from keepsight.frontend.api.kept_responses import KeptResponses
from keepsight.frontend.media_query import MediaPlaces
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.observe.account import RequestAccount
from keepsight.requests import EngineRequest, FinishReason, TierStatus, TokenLogprob, TokenLogprobs, TokenOutput

MODEL = "keepsight-demo"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@dataclass
class FakeEngine:
    """Answers every choice with `text`, one choice after another, and ends each as `end` says."""

    preparer: RequestPreparer
    text: str = "Red. Blue."
    # Generated instead of `text` if not empty.
    token_ids: Sequence[int] = ()
    end: FinishReason = "stop"
    fails_after: int | None = None
    failure: Exception = field(default_factory=lambda: RuntimeError("the engine broke"))
    is_endless: bool = False
    num_engines: int = 1
    num_silent_engines: int = 0
    # If given, no token comes before it is set.
    is_ready: asyncio.Event | None = None
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    num_guessed: dict[int, int] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)
    # The choices that the engine has ended, and those that the reader stopped before.
    ended: set[tuple[str, int]] = field(default_factory=set)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    # Tokens that are part of answers.
    num_read: int = 0
    resets: list[dict[str, bool]] = field(default_factory=list)
    tiers: dict[int, tuple[TierStatus, ...]] = field(default_factory=dict)
    num_abandoned: int = 0
    on_begun: Callable[[], object] = bool
    on_abandoned: Callable[[], object] = bool

    def vector_of(self, request: EngineRequest) -> bytes:
        """Return a vector as long as the demo model's, different for each prompt."""
        numbers = np.arange(self.preparer.hidden_size) + sum(request.token_ids)
        return numbers.astype("<f4").tobytes()

    def list_tiers(self) -> dict[int, tuple[TierStatus, ...]]:
        return self.tiers

    def engine_holds(self, media_hash: str) -> bool:
        return False

    async def find_media(self, media_hashes: Iterable[str]) -> MediaPlaces:
        return MediaPlaces()

    def reset_caches(self, **caches: bool) -> None:
        self.resets.append(caches)

    def note_read(self, request_id: str, choice: int, finish_reason: FinishReason | None) -> None:
        self.num_read += 1
        if finish_reason is not None and (request_id, choice) not in self.ended:
            self.stopped.append((request_id, choice))

    def holding_ends(self, accounts: Sequence[RequestAccount]) -> AbstractContextManager[None]:
        return nullcontext()

    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
        request = prepared.engine_request
        self.requests.append(request)
        self.on_begun()
        prepared.pixels_of({item.media_hash for item in request.media})
        count = 0
        try:
            if self.is_ready:
                await self.is_ready.wait()
            for choice in range(request.sampling_params.n):
                for token in self._tokens(request, choice):
                    if count == self.fails_after:
                        raise self.failure
                    count += 1
                    await asyncio.sleep(0)
                    if token.finish_reason is not None:
                        self.ended.add((request.request_id, choice))
                    yield token
        except (asyncio.CancelledError, GeneratorExit):
            self.num_abandoned += 1
            self.on_abandoned()
            raise

    def _tokens(self, request: EngineRequest, choice: int) -> Iterator[TokenOutput]:
        ids = self.token_ids or self.preparer.tokenizer.encode(self.text)
        logprobs = request.sampling_params.logprobs
        while self.is_endless:
            yield TokenOutput(request.request_id, choice, ids[0])
        for index, token_id in enumerate(ids):
            entries = None
            if logprobs is not None:
                entries = (TokenLogprob(token_id, -0.5, 1), *(TokenLogprob(20 + n, -9.0, n) for n in range(logprobs)))
            prompt_logprobs = tell_prompt(request) if (choice, index) == (0, 0) else None
            is_last = index == len(ids) - 1
            reason: FinishReason | None = "length" if is_last and self.end == "length" else None
            cached, guessed = self.num_cached_tokens.get(choice, 0), self.num_guessed.get(choice, 0)
            vector = self.vector_of(request) if request.wants_vector else None
            yield TokenOutput(
                request.request_id, choice, token_id, entries, reason, cached, prompt_logprobs, vector, guessed
            )
        if self.end == "stop":
            yield TokenOutput(request.request_id, choice, 6, entries, "stop", cached, num_guessed=guessed)


def tell_prompt(request: EngineRequest) -> tuple[TokenLogprobs, ...] | None:
    """Return prompt log-probabilities: minus its position for each token, and -0.5 for its alternatives."""
    num_top = request.sampling_params.prompt_logprobs
    if num_top is None:
        return None
    others = tuple(TokenLogprob(20 + n, -0.5, n + 1) for n in range(num_top))
    own = enumerate(request.token_ids[1:], start=1)
    return tuple((TokenLogprob(token_id, -float(place), 9), *others) for place, token_id in own)


@dataclass
class Client:
    preparer: RequestPreparer
    engine: FakeEngine
    settings: ApiSettings = DEFAULT_SETTINGS
    address: str = "127.0.0.1"
    kept: KeptResponses | None = None
    digests: dict[str, str] | None = None

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return asyncio.run(self._send(method, path, options))

    def make_app(self) -> ASGIApp:
        return create_app(self.preparer, self.engine, MODEL, self.settings, kept=self.kept, digests=self.digests)

    async def _send(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        transport = httpx.ASGITransport(self.make_app(), raise_app_exceptions=False, client=(self.address, 5000))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    def chat(self, *, headers: Any = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": HELLO} | fields
        return self.send("POST", "/v1/chat/completions", json=body, headers=headers)

    def stream(self, **fields: Any) -> list[dict[str, Any]]:
        response = self.chat(stream=True, **fields)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response)


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    """Return status, param and code of an error, after checking that it has the shape of OpenAI's."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return response.status_code, body["error"]["param"], body["error"]["code"]


def complete(client: Client, prompt: Any, **fields: Any) -> httpx.Response:
    return client.send("POST", "/v1/completions", json={"model": MODEL, "prompt": prompt} | fields)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
