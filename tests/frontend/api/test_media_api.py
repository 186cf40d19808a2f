"""Uploads through the API, with a fake engine that records what it is asked to keep."""

import asyncio
import base64
import hashlib
import re
import threading
from collections.abc import AsyncGenerator, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from PIL import Image

from keepsight.api_settings import ApiSettings
from keepsight.config import Config
from keepsight.errors import EngineLostError, MediaStoreError, UnknownHandleError
from keepsight.frontend.api import prepare_answer, request_log
from keepsight.frontend.api.app import create_app
from keepsight.frontend.api.media_api import MAX_UPLOADS_LOOKED_AT
from keepsight.frontend.intake.media_handles import MediaHandles
from keepsight.frontend.media_query import MediaPlaces
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.read_messages import DocumentPart, PicturePart
from keepsight.requests import PromptPin, TokenOutput
from tests.drawn import ask, by_url, draw, to_data_url, to_png
from tests.frontend.api.app_client import MODEL, Client, error_of
from tests.frontend.api.media_server import PICTURE, PNG, QUOTA, KeepingEngine, Server
from tests.frontend.sample_documents import Page, write_pdf
from tests.frontend.sample_pictures import encode
from tests.wait_until import wait_until

OTHER = to_png(draw(2).picture)
SOON = 20  # seconds; normally takes much less


NOWHERE_ELSE = {"bytes": True, "processor_cache": False, "engine": False, "embeddings": [], "prefix": False}
EVERYWHERE = {"bytes": True, "processor_cache": True, "engine": True, "embeddings": ["device"], "prefix": True}


def by_handle(media_id: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"media://{media_id}"}}


@pytest.fixture(scope="module")
def preparer() -> RequestPreparer:
    return RequestPreparer.from_config(Config(max_request_media_bytes=3 * len(PICTURE)))


def test_an_upload_is_described_and_found_again(server: Server) -> None:
    uploaded = server.upload(ttl_seconds=60)
    expected = {
        "object": "media",
        "bytes": len(PICTURE),
        "width": 224,
        "height": 224,
        "sha256": hashlib.sha256(PICTURE).hexdigest(),
        "pinned_until": None,
        "uses": 0,
        "saved": {"upload_bytes": 0, "preprocessings": 0},
        "tiers": NOWHERE_ELSE,
    }
    assert {name: uploaded[name] for name in expected} == expected
    assert 59 <= uploaded["expires_at"] - uploaded["created"] <= 61
    assert server.get(f"/v1/media/{uploaded['id']}") == uploaded


@pytest.mark.parametrize(
    "sent",
    [
        {"content": PICTURE, "headers": PNG},
        {"content": PICTURE, "headers": {"content-type": "application/octet-stream"}},
        {"files": {"file": ("a b.png", PICTURE, "image/png")}, "data": {"ttl_seconds": "60", "warm": "false"}},
        {"json": {"url": to_data_url(PICTURE), "ttl_seconds": 60}},
        {"json": {"data": to_data_url(PICTURE)}},
        {"json": {"data": base64.b64encode(PICTURE).decode(), "url": None}},
    ],
    ids=["raw", "octets", "form", "url", "data url", "base64"],
)
def test_each_way_to_send_a_picture_keeps_the_same_bytes(server: Server, sent: dict[str, Any]) -> None:
    response = server.send("POST", "/v1/media", **sent)
    assert response.status_code == 200, response.text
    assert server.handles.read("", response.json()["id"]) == PICTURE


def test_a_handle_is_equivalent_to_its_picture(server: Server) -> None:
    media_id = server.upload()["id"]
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": to_data_url(PICTURE)}},
        by_handle(media_id),
        {"type": "image_url", "image_url": f"media://{media_id}"},
        {"type": "image_url", "image_url": f"MEDIA://{media_id}"},
        {"type": "image", "media_id": media_id},
        {"type": "image", "url": f"media://{media_id}"},
    ]
    for part in parts:
        assert server.chat(part, "What is it?").status_code == 200
    sent, *named = [(each.token_ids, each.media) for each in server.engine.requests]
    assert named == [sent] * len(named)


DOCUMENT = write_pdf(Page(["A report"]), Page(["of two pages"]))


def test_an_uploaded_pdf_is_used_by_its_id_as_if_it_were_sent(server: Server) -> None:
    uploaded = server.send("POST", "/v1/media", content=DOCUMENT, headers={"content-type": "application/pdf"}).json()
    assert (uploaded["num_pages"], uploaded["bytes"]) == (2, len(DOCUMENT))
    assert uploaded.keys().isdisjoint({"width", "height", "num_samples"})
    by_id = {"file_id": uploaded["id"], "filename": "a.pdf"}
    sent = {"file_data": base64.b64encode(DOCUMENT).decode(), "filename": "a.pdf"}
    source = {"type": "file", "file_id": uploaded["id"]}
    question = {"input": [{"role": "user", "content": [{"type": "input_file", **by_id}]}]}
    document = {"type": "document", "title": "a.pdf", "source": source}
    assert server.chat({"type": "file", "file": sent}).status_code == 200
    assert server.chat({"type": "file", "file": by_id}).status_code == 200
    for path, body in (("/v1/responses", question), ("/v1/messages", {"max_tokens": 1, "messages": ask(document)})):
        assert server.send("POST", path, json={"model": MODEL, **body}).status_code == 200
    requests = server.engine.requests
    assert len({(each.token_ids, tuple(item.media_hash for item in each.media)) for each in requests}) == 1
    assert len({item.media_hash for item in requests[0].media}) == 2
    retrieved = server.get(f"/v1/media/{uploaded['id']}")
    assert (retrieved["uses"], retrieved["tiers"]["engine"]) == (3, True)
    assert retrieved["saved"] == {"upload_bytes": 3 * len(DOCUMENT), "preprocessings": 3}


def test_a_pdf_s_pages_are_made_warm_and_pinned_together(server: Server) -> None:
    media_id = server.upload(DOCUMENT, warm=True)["id"]
    [request] = server.engine.requests
    assert server.engine.held == {item.media_hash for item in request.media}
    pinned = server.send("POST", f"/v1/media/{media_id}/pin", json={"ttl_seconds": 60}).json()["pinned"]
    assert pinned == {"bytes": True, "pixels": True}
    assert server.engine.pins.keys() == server.engine.held
    assert server.send("DELETE", f"/v1/media/{media_id}").status_code == 200
    assert not server.engine.pins


def test_a_pdf_of_another_caller_is_not_found(shared: Server) -> None:
    media_id = shared.upload(DOCUMENT, "ours")["id"]
    answer = shared.chat({"type": "file", "file": {"file_id": media_id}}, key="theirs")
    assert error_of(answer) == (404, "messages[0].content[0].file.file_id", "media_not_found")


def test_uploads_that_wait_for_a_worker_leave_threads_for_others_and_hold_up_no_picture(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    media_id, picture_id, looked_at = server.upload(DOCUMENT)["id"], server.upload()["id"], threading.Event()
    waiting, name_fetched = threading.Semaphore(0), server.preparer.name_fetched

    def wait_for_worker(part: PicturePart, salt: str | None) -> Any:
        if isinstance(part, DocumentPart):
            waiting.release()
            assert looked_at.wait(SOON)
        return name_fetched(part, salt)

    async def ask_meanwhile() -> httpx.Response:
        app = create_app(server.preparer, server.engine, MODEL, server.settings, server.handles, server.engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            asking = [asyncio.create_task(client.get(f"/v1/media/{media_id}")) for _ in range(50)]
            try:
                for _ in range(MAX_UPLOADS_LOOKED_AT):
                    assert await asyncio.get_running_loop().run_in_executor(None, waiting.acquire, True, SOON)
                await asyncio.wait_for(client.get("/v1/media"), SOON / 2)
                return await asyncio.wait_for(client.get(f"/v1/media/{picture_id}"), SOON / 2)
            finally:
                looked_at.set()
                await asyncio.gather(*asking)

    monkeypatch.setattr(server.preparer, "name_fetched", wait_for_worker)
    assert asyncio.run(ask_meanwhile()).status_code == 200


def test_uses_and_skipped_preprocessings_are_counted(server: Server) -> None:
    media_id = server.upload()["id"]
    for _ in range(3):
        server.chat(by_handle(media_id), "What is it?")
    retrieved = server.get(f"/v1/media/{media_id}")
    assert retrieved["uses"] == 3
    assert retrieved["saved"] == {"upload_bytes": 3 * len(PICTURE), "preprocessings": 2}
    assert retrieved["tiers"] == EVERYWHERE


def test_what_only_an_engine_knows_of_is_reported_too(server: Server) -> None:
    """As after a restart, when the first request has yet to come."""
    media_id = server.upload(warm=True)["id"]
    server.engine.found_in_tiers, server.engine.held = server.engine.held, set()
    expected = NOWHERE_ELSE | {"engine": True, "embeddings": ["disk"]}
    assert server.get(f"/v1/media/{media_id}")["tiers"] == expected
    assert server.upload()["tiers"] == expected
    assert server.send("POST", f"/v1/media/{media_id}/pin", json={}).json()["tiers"] == expected
    assert server.upload(OTHER)["tiers"] == NOWHERE_ELSE


def test_a_pdf_is_in_a_tier_only_if_all_its_pages_are(server: Server) -> None:
    media_id = server.upload(DOCUMENT, warm=True)["id"]
    [request] = server.engine.requests
    first, second = (item.media_hash for item in request.media)
    server.engine.found_in_tiers, server.engine.held = {first, second}, {second}
    tiers = server.get(f"/v1/media/{media_id}")["tiers"]
    assert (tiers["embeddings"], tiers["prefix"]) == (["disk"], False)


def test_pins_and_warm_uploads_report_what_engines_hold(server: Server) -> None:
    uploaded = server.upload(warm=True)
    pinned = server.send("POST", f"/v1/media/{uploaded['id']}/pin", json={}).json()
    assert uploaded["tiers"] == pinned["tiers"] == EVERYWHERE


def test_a_request_that_shows_one_handle_many_times_uses_it_once(server: Server) -> None:
    media_id = server.upload()["id"]
    shown = {"type": "image", "media_id": media_id}
    assert server.chat(by_handle(media_id), shown, shown, "How many?").status_code == 200
    used = server.get(f"/v1/media/{media_id}")
    assert (used["uses"], used["saved"]) == (1, {"upload_bytes": len(PICTURE), "preprocessings": 0})


def test_what_only_a_tier_held_was_not_preprocessed_again(server: Server) -> None:
    media_id, other = server.upload()["id"], server.upload(OTHER)["id"]
    server.chat(by_handle(media_id), "What is it?")
    [request] = server.engine.requests
    server.engine.found_in_tiers, server.engine.held = {request.media[0].media_hash}, set()  # as after a restart
    assert server.chat(by_handle(media_id), by_handle(other), "What are these?").status_code == 200
    saved = [server.get(f"/v1/media/{each}")["saved"]["preprocessings"] for each in (media_id, other)]
    assert saved == [1, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_failed_before_its_answer_began_used_nothing(server: Server, stream: bool) -> None:
    media_id, server.engine.fails_after = server.upload()["id"], 0
    assert server.chat(by_handle(media_id), "What is it?", stream=stream).status_code == 500
    assert server.get(f"/v1/media/{media_id}")["uses"] == 0


def test_a_warm_upload_is_preprocessed_before_its_first_use(server: Server) -> None:
    uploaded = server.upload(warm=True)
    assert uploaded["tiers"]["engine"]
    [request] = server.engine.requests
    assert request.sampling_params.max_tokens == 1
    assert request.priority > 0
    server.chat(by_handle(uploaded["id"]), "What is it?")
    assert server.engine.requests[1].media[0].media_hash == request.media[0].media_hash
    assert server.get(f"/v1/media/{uploaded['id']}")["saved"]["preprocessings"] == 1


@pytest.mark.parametrize("path", ["/v1/media?warm=true", "/v1/media/{}/pin?warm=true"])
def test_warming_is_no_client_s_answer_and_is_found_by_the_request_s_id(server: Server, path: str) -> None:
    path = path.format(server.upload()["id"])
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {**PNG, "x-request-id": "mine", "traceparent": trace}
    response = server.send("POST", path, content=b"" if "pin" in path else PICTURE, headers=headers)
    [account] = server.engine.accounts
    assert (account.id, account.trace_parent, account.wants_answer) == ("mine", trace, False)
    assert "identify;dur=" in response.headers["server-timing"]


def test_an_upload_that_is_not_warmed_has_no_stages(server: Server) -> None:
    assert "server-timing" not in server.send("POST", "/v1/media", content=PICTURE, headers=PNG).headers


def test_the_log_line_of_a_warm_upload_has_its_stages(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger=request_log.__name__):
        server.upload(warm=True)
    assert re.search(r"POST /v1/media 200 in .*; ms: .*identify", caplog.text)


@pytest.mark.parametrize(("content", "failure"), [(PICTURE[:-300], None), (PICTURE, EngineLostError("gone"))])
def test_an_upload_that_cannot_be_warmed_is_not_kept(server: Server, content: bytes, failure: Exception | None) -> None:
    if failure is not None:
        server.engine.failure, server.engine.fails_after = failure, 0
    response = server.send("POST", "/v1/media?warm=true", content=content, headers=PNG)
    expected = (503, None, "engine_lost") if failure else (400, "body", "picture_unreadable")
    assert error_of(response) == expected
    assert server.get("/v1/media")["data"] == []


def test_a_client_that_leaves_while_its_upload_is_warmed_leaves_nothing(server: Server) -> None:
    server.engine.is_ready = asyncio.Event()  # never set

    async def call_and_leave() -> None:
        messages: list[Any] = [{"type": "http.request", "body": PICTURE, "more_body": False}]

        async def receive() -> Any:
            while not messages and not server.engine.requests:
                await asyncio.sleep(0.01)
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        app = create_app(server.preparer, server.engine, MODEL, handles=server.handles, pixel_cache=server.engine)
        scope = {"type": "http", "method": "POST", "path": "/v1/media", "query_string": b"warm=true"}
        headers = [(b"content-type", b"image/png")]
        await asyncio.wait_for(app({**scope, "headers": headers}, receive, send), timeout=10)
        await asyncio.to_thread(wait_until, lambda: server.engine.num_abandoned)
        assert server.engine.num_abandoned == 1  # checked here, as closing the loop would cancel whatever still runs

    asyncio.run(call_and_leave())
    assert not server.get("/v1/media")["data"]


def test_a_pin_keeps_the_bytes_and_any_cached_pixels(server: Server) -> None:
    media_id = server.upload(ttl_seconds=60)["id"]
    pin = f"/v1/media/{media_id}/pin"
    body = server.send("POST", pin, json={"ttl_seconds": 600}).json()
    assert body["pinned"] == {"bytes": True, "pixels": False}
    assert body["pinned_until"] == body["expires_at"] >= body["created"] + 600
    body = server.send("POST", pin, json={"ttl_seconds": 500, "warm": True}).json()
    assert body["pinned"] == {"bytes": True, "pixels": True}
    assert list(server.engine.pins.values()) == [500]
    assert server.send("DELETE", f"/v1/media/{media_id}").json() == {"id": media_id, "object": "media", "deleted": True}
    assert not server.engine.pins


class MakingEngine(KeepingEngine):
    async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
        prepared.learn(prepared.pixels_of(prepared.makeable_media))
        async for token in super().generate(prepared):
            yield token


def test_a_warm_pin_uses_the_final_hash_of_the_picture(tmp_path: Path) -> None:
    preparer = RequestPreparer.from_config(Config())
    with closing(MediaHandles(tmp_path, QUOTA)) as handles:
        server = Server(preparer, MakingEngine(preparer), handles, ApiSettings())
        server.upload(warm=True)
        [known] = server.engine.held
        same = server.upload(encode(draw(1).picture, "WEBP", lossless=True), warm=False)["id"]
        server.send("POST", f"/v1/media/{same}/pin", json={"ttl_seconds": 600, "warm": True})
        assert server.engine.pins == {known: 600}


def test_a_warm_pin_pins_in_the_engine_too(server: Server) -> None:
    media_id = server.upload(warm=True)["id"]
    server.send("POST", f"/v1/media/{media_id}/pin", json={"ttl_seconds": 500})
    server.send("POST", f"/v1/media/{media_id}/pin", json={"ttl_seconds": 600, "warm": True})
    uploaded, pinned = server.engine.requests
    assert uploaded.pins == ()
    assert pinned.pins == (PromptPin(len(pinned.token_ids), 600),)


@pytest.mark.parametrize("path", ["/v1/media", "/v1/media/{id}/pin"])
def test_a_request_that_warms_counts_as_a_waiting_request(server: Server, path: str) -> None:
    path = path.format(id=server.upload()["id"])

    async def ask_meanwhile() -> httpx.Response:
        server.engine.is_ready = asyncio.Event()
        settings = ApiSettings(max_waiting_requests=1)
        app = create_app(server.preparer, server.engine, MODEL, settings, server.handles, server.engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            content = PICTURE if path == "/v1/media" else b""
            warming = asyncio.create_task(client.post(path, params={"warm": "true"}, content=content, headers=PNG))
            while not server.engine.requests:
                await asyncio.sleep(0)
            refused = await client.post("/tokenize", json={"prompt": "Hello"})
            server.engine.is_ready.set()
            assert (await warming).status_code == 200
            return refused

    assert error_of(asyncio.run(ask_meanwhile())) == (503, None, "server_overloaded")


@pytest.mark.parametrize("path", ["/v1/media", "/v1/media/{id}/pin"])
def test_a_request_that_asks_engines_for_their_tiers_does_not_count_as_a_waiting_one(server: Server, path: str) -> None:
    path = path.format(id=server.upload()["id"])
    find_media, is_asked, may_answer = server.engine.find_media, asyncio.Event(), asyncio.Event()

    async def find_slowly(media_hashes: Iterable[str]) -> MediaPlaces:
        is_asked.set()
        await may_answer.wait()
        return await find_media(media_hashes)

    async def ask_meanwhile() -> httpx.Response:
        server.engine.find_media = find_slowly  # type: ignore[method-assign]
        settings = ApiSettings(max_waiting_requests=1)
        app = create_app(server.preparer, server.engine, MODEL, settings, server.handles, server.engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            content = PICTURE if path == "/v1/media" else b""
            uploading = asyncio.create_task(client.post(path, content=content, headers=PNG))
            await is_asked.wait()
            answered = await client.post("/tokenize", json={"prompt": "Hello"})
            may_answer.set()
            assert (await uploading).status_code == 200
            return answered

    assert asyncio.run(ask_meanwhile()).status_code == 200


def test_deleting_one_of_two_pinned_handles_of_a_picture_leaves_its_pixels_pinned(server: Server) -> None:
    first, second = (server.upload(warm=True)["id"] for _ in range(2))
    for media_id in (first, second):
        server.send("POST", f"/v1/media/{media_id}/pin")
    server.send("DELETE", f"/v1/media/{first}")
    assert server.engine.pins
    server.send("DELETE", f"/v1/media/{second}")
    assert not server.engine.pins


def test_the_pages_of_a_list_cover_it_in_order(server: Server) -> None:
    ids = [server.upload()["id"] for _ in range(3)]
    page = server.get("/v1/media", limit=2)
    assert [each["id"] for each in page["data"]] == [ids[2], ids[1]]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    page = server.get("/v1/media", limit=2, after=page["last_id"])
    assert [each["id"] for each in page["data"]] == [ids[0]]
    assert not page["has_more"]
    page = server.get("/v1/media", order="asc")
    assert [each["id"] for each in page["data"]] == ids


def test_another_key_s_handle_is_not_found(shared: Server) -> None:
    media_id = shared.upload(key="ours")["id"]
    path = f"/v1/media/{media_id}"
    for method, target in (("GET", path), ("DELETE", path), ("POST", f"{path}/pin")):
        assert error_of(shared.send(method, target, "theirs")) == (404, "id", "media_not_found")
    assert shared.get("/v1/media", "theirs")["data"] == []
    field_name = "messages[0].content[0].image_url.url"
    assert error_of(shared.chat(by_handle(media_id), key="theirs")) == (404, field_name, "media_not_found")
    assert shared.chat(by_handle(media_id), key="ours").status_code == 200
    assert shared.send("GET", path).status_code == 401


def test_each_key_has_a_quota_of_its_own(shared: Server) -> None:
    for _ in range(4):
        shared.upload(key="ours")
    refused = shared.send("POST", "/v1/media", "ours", content=OTHER, headers=PNG)
    assert error_of(refused) == (413, "media", "media_quota_exceeded")
    shared.upload(key="theirs")


def test_isolated_keys_warm_their_own_caches(shared: Server) -> None:
    shared.settings = ApiSettings(api_keys=("ours", "theirs"), cache_isolation="api-key")
    for key in ("ours", "theirs"):
        assert shared.upload(key=key, warm=True)["tiers"]["engine"]
    ours, theirs = (request.media[0].media_hash for request in shared.engine.requests)
    assert ours != theirs


def test_a_salt_selects_the_caches_that_are_warmed_and_described(server: Server) -> None:
    uploaded = server.upload(warm=True, cache_salt="a")
    path = f"/v1/media/{uploaded['id']}"
    assert server.get(path, cache_salt="a")["tiers"]["engine"]
    assert not server.get(path)["tiers"]["engine"]
    server.chat(by_handle(uploaded["id"]), cache_salt="a")
    assert server.engine.requests[1].media[0].media_hash == server.engine.requests[0].media[0].media_hash


def test_a_request_s_handles_count_towards_its_media_limits(server: Server) -> None:
    media_id = server.upload()["id"]
    parts = [by_handle(media_id)] * 4
    assert error_of(server.chat(*parts)) == (413, "messages[0].content[3].image_url.url", "media_too_large")


def test_an_unknown_handle_is_refused_before_anything_is_downloaded(server: Server) -> None:
    at_url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}  # refused as soon as it is tried
    status, field, _ = error_of(server.chat(at_url, by_handle("media_0123")))
    assert (status, field) == (404, "messages[0].content[1].image_url.url")


def test_a_breakpoint_keeps_a_handle_for_its_time(server: Server) -> None:
    media_id = server.upload(ttl_seconds=60, warm=True)["id"]
    for part in (by_handle(media_id), {"type": "image", "media_id": media_id}):
        kept = {**part, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
        assert server.chat(kept, prompt_cache_key="k", prompt_cache_options={"mode": "implicit"}).status_code == 200
    retrieved = server.get(f"/v1/media/{media_id}")
    assert retrieved["pinned_until"] == retrieved["expires_at"] >= retrieved["created"] + 12 * 3600
    assert list(server.engine.pins.values()) == [12 * 3600]


@pytest.mark.parametrize("error", [MediaStoreError("media", "is full"), UnknownHandleError("id", "deleted meanwhile")])
def test_a_breakpoint_on_a_handle_that_cannot_be_pinned_is_no_error(
    server: Server, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = by_handle(server.upload()["id"])
    monkeypatch.setattr(server.handles, "pin", mock.Mock(side_effect=error))
    assert server.chat(marked(handle)).status_code == 200


def test_a_request_refused_after_preparation_does_not_claim_its_uuid(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = ({**by_url(Image.new("RGB", (size, size))), "uuid": "free"} for size in (8, 16))
    with monkeypatch.context() as patched:
        patched.setattr(prepare_answer, "MAX_PROMPT_LOGPROBS_IN_ANSWER", 1)
        assert error_of(server.chat(small, prompt_logprobs=1))[:2] == (400, "prompt_logprobs")
    assert server.chat(large).status_code == 200


def test_a_request_whose_tokens_are_only_counted_does_not_claim_its_uuid(server: Server) -> None:
    small, large = ({**by_url(Image.new("RGB", (size, size))), "uuid": "counted"} for size in (8, 16))
    assert server.send("POST", "/tokenize", json={"model": MODEL, "messages": ask(small)}).status_code == 200
    assert server.chat(large).status_code == 200
    refused = server.send("POST", "/tokenize", json={"model": MODEL, "messages": ask(small)})
    assert error_of(refused)[2] == "media_uuid_conflict"


def marked(part: dict[str, Any], **ttl: str) -> dict[str, Any]:
    return {**part, "prompt_cache_breakpoint": {"mode": "explicit", **ttl}}


def test_a_breakpoint_in_an_embeddings_request_keeps_pixels_too(server: Server) -> None:
    part = marked(by_handle(server.upload(ttl_seconds=60)["id"]), ttl="12h")
    assert server.send("POST", "/v1/embeddings", json={"messages": ask(part)}).status_code == 200
    [asked] = server.engine.requests
    assert server.engine.pins == {item.media_hash: 12 * 3600 for item in asked.media}
    assert server.send("POST", "/v1/embeddings", json={"input": ["Hello", "Red"]}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_breakpoint_keeps_the_pixels_of_all_media_before_it(server: Server, stream: bool) -> None:
    handle = by_handle(server.upload(ttl_seconds=60)["id"])
    other, last = ({"type": "image", "url": to_data_url(each)} for each in (OTHER, to_png(draw(3).picture)))
    parts = (handle, marked({"type": "text", "text": "Hi"}, ttl="12h"), marked(other), last)
    assert server.chat(*parts, stream=stream).status_code == 200
    hashes = [item.media_hash for item in server.engine.requests[-1].media]
    assert server.engine.pins == {hashes[0]: 12 * 3600, hashes[1]: 1800}
    assert server.get("/v1/media")["data"][0]["pinned_until"] is not None


@pytest.mark.parametrize("stream", [False, True])
def test_a_breakpoint_keeps_pixels_under_the_final_hash_of_the_picture(tmp_path: Path, stream: bool) -> None:
    preparer = RequestPreparer.from_config(Config())
    with closing(MediaHandles(tmp_path, QUOTA)) as handles:
        server = Server(preparer, MakingEngine(preparer), handles, ApiSettings())
        server.chat(by_url(draw(1).picture))
        [known] = server.engine.held
        same = to_data_url(encode(draw(1).picture, "WEBP", lossless=True))
        assert server.chat(marked({"type": "image", "url": same}), stream=stream).status_code == 200
        assert server.engine.pins == {known: 1800}


def test_a_breakpoint_pins_the_prompt_before_it_in_the_engine(server: Server) -> None:
    picture = {"type": "image", "url": to_data_url(PICTURE)}
    server.chat(picture, marked({"type": "text", "text": "Look."}), {"type": "text", "text": "What is it?"})
    [request] = server.engine.requests
    [pin] = request.pins
    assert request.media[0].span.end < pin.num_tokens < len(request.token_ids)
    assert pin.seconds == 1800


def test_pictures_beyond_the_pin_quota_are_answered_but_not_pinned(server: Server) -> None:
    for number in range(QUOTA.max_count + 2):
        part = {"type": "image", "url": to_data_url(to_png(draw(10 + number).picture))}
        assert server.chat(marked(part)).status_code == 200
    assert len(server.engine.pins) == QUOTA.max_count


def test_a_marked_picture_stays_pinned_when_its_handle_is_deleted(server: Server) -> None:
    media_id = server.upload(warm=True)["id"]
    server.send("POST", f"/v1/media/{media_id}/pin", json={})
    server.chat(marked({"type": "image", "url": to_data_url(PICTURE)}))
    assert server.send("DELETE", f"/v1/media/{media_id}").status_code == 200
    assert len(server.engine.pins) == 1


def test_all_prompts_of_a_request_have_the_same_cache_key(server: Server) -> None:
    server.chat("Hi", prompt_cache_key="k")
    server.send("POST", "/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1, "prompt_cache_key": "k"})
    assert server.engine.cache_keys == ["k"] * 3


@pytest.mark.parametrize(
    ("asked", "name", "code"),
    [
        ({"mode": "explicit", "ttl": "1h"}, ".ttl", "invalid_argument"),
        ({"mode": "explicit", "ttl": []}, ".ttl", "invalid_argument"),
        ({"ttl": "30m"}, ".mode", "invalid_argument"),
        ({"mode": "explicit", "scope": 1}, ".scope", "unsupported_field"),
        (True, "", "invalid_argument"),
    ],
)
def test_an_invalid_breakpoint_is_refused_by_name(server: Server, asked: Any, name: str, code: str) -> None:
    parts = ({"type": "text", "text": "Hi"}, {"type": "image", "url": to_data_url(PICTURE)})
    for part in parts:
        response = server.chat({**part, "prompt_cache_breakpoint": asked})
        assert error_of(response) == (400, f"messages[0].content[0].prompt_cache_breakpoint{name}", code)
        assert server.chat({**part, "prompt_cache_breakpoint": {"mode": "explicit"}}).status_code == 200


@pytest.mark.parametrize(
    ("field_name", "taken", "refused"),
    [
        ("prompt_cache_retention", "in_memory", "24h"),
        ("prompt_cache_options", {"mode": "implicit"}, {"mode": "explicit"}),
        ("prompt_cache_options", {}, {"ttl": "30m"}),
    ],
)
def test_cache_options_are_accepted_only_if_they_match_what_is_done(
    server: Server, field_name: str, taken: Any, refused: Any
) -> None:
    assert server.chat("Hi", **{field_name: taken}).status_code == 200
    assert error_of(server.chat("Hi", **{field_name: refused})) == (400, field_name, "unsupported_field")


def test_tokenize_reads_handles_too(server: Server) -> None:
    media_id = server.upload()["id"]
    body = {"model": MODEL, "messages": ask(by_handle(media_id))}
    response = server.send("POST", "/tokenize", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["image_tokens"] > 0
    assert server.get(f"/v1/media/{media_id}")["uses"] == 0


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"content": b"", "headers": PNG}, (400, "body", "picture_unreadable")),
        ({"content": b"no picture", "headers": PNG}, (400, "body", "picture_unreadable")),
        ({"content": PICTURE}, (415, "Content-Type", "unsupported_body")),
        ({"content": PICTURE, "headers": {"content-type": "text/html"}}, (415, "Content-Type", "unsupported_body")),
        ({"json": {}}, (400, "url", "invalid_argument")),
        ({"json": {"url": "http://a", "data": "b"}}, (400, "url", "invalid_argument")),
        ({"json": {"url": 1}}, (400, "url", "invalid_argument")),
        ({"json": {"url": "cat.png"}}, (400, "url", "invalid_argument")),
        ({"json": {"url": "file:///etc/passwd"}}, (400, "url", "media_refused")),
        ({"json": {"url": "http://127.0.0.1/"}}, (400, "url", "media_refused")),
        ({"json": {"url": "media://media_0"}}, (400, "url", "unsupported_field")),
        ({"json": {"data": "%%%"}}, (400, "data", "picture_unreadable")),
        ({"json": []}, (400, "body", "invalid_argument")),
        ({"json": {"data": "YQ==", "wram": True}}, (400, "wram", "unsupported_field")),
        ({"json": {"data": "YQ==", "warm": "yes"}}, (400, "warm", "invalid_argument")),
        ({"json": {"data": "YQ==", "cache_salt": ""}}, (400, "cache_salt", "invalid_argument")),
        (
            {"content": PICTURE, "headers": PNG, "params": {"ttl_seconds": "nan"}},
            (400, "ttl_seconds", "invalid_argument"),
        ),
        (
            {"content": PICTURE, "headers": PNG, "params": {"ttl_seconds": "9e9"}},
            (400, "ttl_seconds", "invalid_argument"),
        ),
        ({"content": PICTURE, "headers": PNG, "params": {"pin": "1"}}, (400, "pin", "unsupported_field")),
        ({"data": {"a": "b"}, "files": {"picture": PICTURE}}, (400, "file", "invalid_argument")),
        ({"files": [("file", PICTURE), ("file", PICTURE)]}, (400, "file", "invalid_argument")),
        (
            {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
            (400, "Content-Type", "invalid_argument"),
        ),
        (
            {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            (400, "body", "invalid_argument"),
        ),
    ],
)
def test_an_invalid_upload_is_refused_by_field_name(
    server: Server, sent: dict[str, Any], expected: tuple[int, str, str]
) -> None:
    assert error_of(server.send("POST", "/v1/media", **sent)) == expected
    assert server.get("/v1/media")["data"] == []


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/media/media_0", (404, "id", "media_not_found")),
        ("/v1/media?limit=0", (400, "limit", "invalid_argument")),
        ("/v1/media?limit=101", (400, "limit", "invalid_argument")),
        (f"/v1/media?limit=000000001{9 * '9'}", (400, "limit", "invalid_argument")),
        ("/v1/media?limit=x", (400, "limit", "invalid_argument")),
        ("/v1/media?order=up", (400, "order", "invalid_argument")),
        ("/v1/media?foo=1", (400, "foo", "unsupported_field")),
        ("/v1/media?after=media_0", (404, "after", "media_not_found")),
        ("/v1/media/%ed%a0%80", (404, "id", "media_not_found")),
    ],
)
def test_an_invalid_media_query_is_refused_by_field_name(
    server: Server, path: str, expected: tuple[int, str, str]
) -> None:
    assert error_of(server.send("GET", path)) == expected


def test_a_part_has_a_handle_or_a_picture_not_both(server: Server) -> None:
    part = {"type": "image", "media_id": "media_0", "url": to_data_url(PICTURE)}
    assert error_of(server.chat(part)) == (400, "messages[0].content[0].url", "invalid_argument")
    assert error_of(server.chat({"type": "image", "media_id": 1}))[1] == "messages[0].content[0].media_id"


def test_the_description_of_the_api_has_each_of_its_paths(server: Server) -> None:
    paths = server.get("/openapi.json")["paths"]
    described = {(path, method) for path in paths if path.startswith("/v1/media") for method in paths[path]}
    one = "/v1/media/{id}"
    assert described == {
        ("/v1/media", "get"),
        ("/v1/media", "post"),
        (one, "get"),
        (one, "delete"),
        (f"{one}/pin", "post"),
    }


def test_a_server_without_uploads_has_neither_their_paths_nor_their_urls(server: Server) -> None:
    client = Client(server.preparer, server.engine)
    assert client.send("GET", "/v1/media").status_code == 404
    assert error_of(client.chat(messages=ask(by_handle("media_0"))))[2] == "unsupported_field"
