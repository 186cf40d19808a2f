"""Uploads and uuids at a real `keepsight serve` with two frontends: both know what either has received."""

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.drawn import Drawn, ask, by_url, draw, to_png
from tests.real_server import END_SECONDS, serving

NUM_REQUESTS = 12  # each on its own connection, so that both frontends get some


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--api-server-count", "2", "--api-key", "ours", "theirs", "--mm-processor-cache-gb", "0.1")
    with serving(log, *options) as (process, port):
        yield f"http://127.0.0.1:{port}/v1"
        process.send_signal(signal.SIGINT)
        assert process.wait(END_SECONDS) == 130
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    return draw(11)


def send(method: str, url: str, key: str = "ours", **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **options.pop("headers", {})}
    return httpx.request(method, url, headers=headers, timeout=60, **options)


def upload(url: str, drawn: Drawn, **query: Any) -> dict[str, Any]:
    picture = to_png(drawn.picture)
    response = send("POST", f"{url}/media", content=picture, headers={"content-type": "image/png"}, params=query)
    assert response.status_code == 200, response.text
    uploaded: dict[str, Any] = response.json()
    return uploaded


def test_every_frontend_accepts_an_uploaded_handle(url: str, drawn: Drawn) -> None:
    media_id = upload(url, drawn, warm=True)["id"]
    messages = ask({"type": "image", "media_id": media_id}, drawn.questions[0].text)
    for _ in range(NUM_REQUESTS):
        body = {"model": "keepsight-demo", "messages": messages, "temperature": 0}
        answered = send("POST", f"{url}/chat/completions", json=body)
        assert answered.json()["choices"][0]["message"]["content"] == drawn.description
    shown = send("GET", f"{url}/media/{media_id}").json()
    assert shown["uses"] == NUM_REQUESTS
    assert shown["saved"]["preprocessings"] == NUM_REQUESTS
    held = {"bytes": True, "processor_cache": True, "engine": True, "prefix": True}
    assert shown["tiers"] == {**held, "embeddings": shown["tiers"]["embeddings"]}
    assert shown["tiers"]["embeddings"][0] == "device"


def test_a_uuid_replaces_its_picture_on_every_frontend(url: str, drawn: Drawn) -> None:
    sent = by_url(drawn.picture) | {"uuid": "drawn"}
    for part in (sent, *[sent | {"image_url": None}] * NUM_REQUESTS):
        body = {"model": "keepsight-demo", "messages": ask(part, drawn.questions[0].text), "temperature": 0}
        answered = send("POST", f"{url}/chat/completions", json=body)
        assert answered.json()["choices"][0]["message"]["content"] == drawn.description, answered.text


def test_pins_and_deletions_of_handles_apply_to_all_frontends(url: str, drawn: Drawn) -> None:
    path = f"{url}/media/{upload(url, drawn, warm=True)['id']}"
    assert send("POST", f"{path}/pin", json={"ttl_seconds": 60}).json()["pinned"] == {"bytes": True, "pixels": True}
    assert {send("GET", path, "theirs").status_code for _ in range(NUM_REQUESTS)} == {404}
    assert send("DELETE", path).status_code == 200
    assert {send("GET", path).status_code for _ in range(NUM_REQUESTS)} == {404}
