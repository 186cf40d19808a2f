"""The event loop keeps running whatever the frontend does for requests with pictures.

Each long step is made to wait until the loop has run a number of turns, so a step that runs on the loop, or blocks it,
is detected on a machine of any speed.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from keepsight.frontend.api import files_api, media_api
from keepsight.frontend.api.app import create_app
from keepsight.frontend.api.prepare_answer import MAX_URL_BYTES_ON_LOOP
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.identity import identify_picture
from keepsight.frontend.intake import fetch_media
from keepsight.frontend.intake.media_handles import MediaHandles, MediaQuota
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.pixels import make_pixels
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt import expand_prompt, render_prompt
from keepsight.requests import EngineRequest, MediaArrived, ToEngine, TokenOutput
from tests.drawn import ask, draw, to_data_url, to_png
from tests.frontend.api.app_client import MODEL, FakeEngine

NUM_CLIENTS = 8
BEATS = 20
PATIENCE = 20  # seconds; normally takes milliseconds


class Heart:
    def __init__(self) -> None:
        self.num_beats = 0
        self.held = set[str]()

    async def beat(self) -> None:
        while True:
            self.num_beats += 1
            # Not 0: the loop has to look at its sockets and timers too.
            await asyncio.sleep(0.0001)

    def hold(self, step: str) -> None:
        """Wait until the loop has run for a while."""
        self.held.add(step)
        enough, waited = self.num_beats + BEATS, threading.Event()
        for _ in range(PATIENCE * 1000):
            if self.num_beats >= enough:
                return
            waited.wait(0.001)
        raise AssertionError(f"the event loop stands still during {step}")


class Engine:
    """Answers with one token as soon as all of a request's pictures have come."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self._thread = client, ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._missing: dict[str, set[str]] = {}

    def send(self, message: ToEngine) -> bool:
        with self._lock:
            if isinstance(message, EngineRequest):
                self._missing[message.request_id] = set(message.coming_media)
            elif isinstance(message, MediaArrived):
                for missing in self._missing.values():
                    missing.discard(message.media_hash)
            for request_id in [request_id for request_id, missing in self._missing.items() if not missing]:
                del self._missing[request_id]
                self._thread.submit(self._client.receive, [TokenOutput(request_id, 0, 42, finish_reason="length")])
        return True


Steps = tuple[tuple[Any, str], ...]
STEPS: Steps = (
    (render_prompt.ChatTemplate, "render"),
    (fetch_media, "read_data_url"),
    (identify_picture, "read_geometry"),
    (expand_prompt.PromptExpander, "expand"),
    (identify_picture, "hash_content"),
    (make_pixels, "decode_picture"),
)
# The steps that only uploads have, besides those for pictures in messages.
UPLOAD_STEPS: Steps = ((files_api, "read_file"), (media_api, "read_upload"))


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Heart:
    heart = Heart()
    for owner, name in (*STEPS, *UPLOAD_STEPS):
        monkeypatch.setattr(owner, name, _holding(heart, name, getattr(owner, name)))
    return heart


def _holding(heart: Heart, step: str, do: Callable[..., Any]) -> Callable[..., Any]:
    def held(*args: Any, **options: Any) -> Any:
        heart.hold(step)
        return do(*args, **options)

    return held


def large_picture(seed: int) -> dict[str, Any]:
    """Return a picture too large to be hashed on the loop; smaller ones are, as waking a thread would take longer."""
    content = to_png(draw(seed).picture) + bytes(MAX_URL_BYTES_ON_LOOP)
    return {"type": "image_url", "image_url": {"url": to_data_url(content)}}


def test_no_step_of_a_request_blocks_the_event_loop(preparer: RequestPreparer, heart: Heart) -> None:
    engines = EngineClient(MediaPool(2))
    engines.connect(Engine(engines).send)
    app = create_app(preparer, engines, MODEL)
    bodies = [{"messages": ask(large_picture(seed), "What?"), "max_tokens": 1} for seed in range(NUM_CLIENTS)]

    async def run() -> list[int]:
        beating = asyncio.create_task(heart.beat())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE) as client:
            asked = (client.post("/v1/chat/completions", json=body) for body in bodies)
            answers = await asyncio.gather(*asked)
        beating.cancel()
        return [answer.status_code for answer in answers]

    try:
        assert asyncio.run(run()) == [200] * NUM_CLIENTS
    finally:
        engines.close()
    assert heart.held == {name for _, name in STEPS}


def test_no_step_of_an_upload_blocks_the_event_loop(preparer: RequestPreparer, heart: Heart, tmp_path: Path) -> None:
    handles = MediaHandles(tmp_path, MediaQuota(2**20, 2))
    app = create_app(preparer, FakeEngine(preparer), MODEL, handles=handles)
    file: Any = {"files": {"file": ("a.png", to_png(draw(1).picture))}}

    async def run() -> list[int]:
        beating = asyncio.create_task(heart.beat())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE) as client:
            answers = [await client.post(path, **file) for path in ("/v1/files", "/v1/media")]
        beating.cancel()
        return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [200, 200]
    handles.close()
    assert heart.held > {name for _, name in UPLOAD_STEPS}
