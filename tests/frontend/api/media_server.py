"""The whole API with uploads, and a fake engine that also records what it is asked to keep."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.app import create_app
from keepsight.frontend.intake.media_handles import MediaHandles, MediaQuota
from keepsight.frontend.media_query import MediaPlaces
from keepsight.frontend.pixels.pixel_cache import PixelCache
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.observe.account import RequestAccount
from keepsight.requests import TokenOutput
from tests.drawn import ask, draw, to_png
from tests.frontend.api.app_client import MODEL, FakeEngine

PICTURE = to_png(draw(1).picture)
QUOTA = MediaQuota(4 * len(PICTURE), 4)
PNG = {"content-type": "image/png"}


@dataclass
class KeepingEngine(FakeEngine, PixelCache):
    """Holds every item that a request has had, and is also the processor cache, with the pixels of those items."""

    held: set[str] = field(default_factory=set)
    # Held only on disk, of which no frontend is told unasked.
    found_in_tiers: set[str] = field(default_factory=set)
    pins: dict[str, float] = field(default_factory=dict)
    cache_keys: list[str | None] = field(default_factory=list)
    accounts: list[RequestAccount] = field(default_factory=list)

    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
        self.cache_keys.append(prepared.cache_key)
        self.accounts.append(prepared.account)
        for media_hash in prepared.makeable_media:
            if media_hash not in self.held and media_hash not in self.found_in_tiers:
                prepared.account.note_made(0, 0, 0, [media_hash])
        async for token in super().generate(prepared):
            self.held |= {item.media_hash for item in prepared.engine_request.media}
            yield token

    def engine_holds(self, media_hash: str) -> bool:
        return media_hash in self.held

    async def find_media(self, media_hashes: Iterable[str]) -> MediaPlaces:
        asked = {*media_hashes}
        places = {"device": self.held, "disk": self.found_in_tiers}
        return MediaPlaces(tuple(tier for tier, held in places.items() if asked <= held), asked <= self.held)

    def is_held(self, media_hash: str) -> bool:
        return media_hash in self.held

    def pin(self, media_hash: str, seconds: float) -> bool:
        if media_hash in self.held:
            self.pins[media_hash] = round(seconds)
        return media_hash in self.held

    def unpin(self, media_hash: str) -> None:
        self.pins.pop(media_hash, None)


@dataclass
class Server:
    """A server in process; `key` is the caller's API key."""

    preparer: RequestPreparer
    engine: KeepingEngine
    handles: MediaHandles
    settings: ApiSettings

    def send(self, method: str, path: str, key: str | None = None, **options: Any) -> httpx.Response:
        if key is not None:
            options["headers"] = {**options.get("headers", {}), "authorization": f"Bearer {key}"}
        return asyncio.run(self._send(method, path, options))

    async def _send(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        app = create_app(self.preparer, self.engine, MODEL, self.settings, self.handles, self.engine)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    def upload(self, content: bytes = PICTURE, key: str | None = None, **query: Any) -> dict[str, Any]:
        response = self.send("POST", "/v1/media", key, content=content, headers=PNG, params=query)
        assert response.status_code == 200, response.text
        uploaded: dict[str, Any] = response.json()
        return uploaded

    def get(self, path: str, key: str | None = None, **query: Any) -> dict[str, Any]:
        response = self.send("GET", path, key, params=query)
        assert response.status_code == 200, response.text
        got: dict[str, Any] = response.json()
        return got

    def chat(self, *parts: Any, key: str | None = None, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": ask(*parts), **fields}
        return self.send("POST", "/v1/chat/completions", key, json=body)
