"""Pictures from the network and the file system, through `LLM` and HTTP, including hostile ones."""

import asyncio
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from keepsight import LLM, SamplingParams
from keepsight.config import Config
from keepsight.errors import PictureError, PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.api.answer import Engine
from keepsight.frontend.api.app import create_app
from keepsight.frontend.pixels.make_pixels import Made, MakingJob, PictureJob
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.image_processor_config import ImageProcessorConfig
from tests.drawn import ask, by_url, draw, to_data_url, to_png
from tests.frontend.api.app_client import Client, FakeEngine
from tests.frontend.picture_server import LOCAL, Asked, PictureServer, picture_server, response
from tests.frontend.sample_pictures import encode, random_picture
from tests.place import placed

GREEDY = SamplingParams(temperature=0, max_tokens=8)
NO_ENGINE = cast(Engine, None)  # never reached in these tests
URL_FIELD = "messages[0].content[0].image_url.url"


@pytest.fixture(scope="module")
def server() -> Iterator[PictureServer]:
    with picture_server() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(**placed(allowed_media_networks=LOCAL, allowed_local_media_path=folder)) as llm:
        yield llm


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_picture_is_the_same_from_any_source(llm: LLM, server: PictureServer, folder: Path) -> None:
    drawn = draw(5)
    png = to_png(drawn.picture)
    (folder / "a.png").write_bytes(png)
    url = server.serve("/a.png", response(png, Cache_Control="max-age=600"))
    parts = [by_url(drawn.picture), at(url), at((folder / "a.png").as_uri()), at(url)]
    question = drawn.questions[0].text
    outputs = llm.chat([ask(part, question) for part in parts], GREEDY)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    prompt = f"<start_of_turn>user\n<start_of_image>{question}<end_of_turn>\n<start_of_turn>model\n"
    [generated] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": url}}, GREEDY)
    assert generated.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert server.num_asked("/a.png") == 1


# Hostile content ----------------------------------------------------------------------------------------------


def png_of(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """Return a PNG with a valid header but only the given chunks."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    packed = b"".join(
        len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
        for kind, content in ((b"IHDR", head), *chunks, (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + packed


def endless_gif() -> bytes:
    frames = [random_picture("P", (20, 20), seed) for seed in range(50)]
    return encode(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0)


def giant_jpeg() -> bytes:
    sides = [struct.pack(">HH", side, side) for side in (16, 65500)]
    return encode(random_picture("RGB", (16, 16), 1), "JPEG").replace(sides[0], sides[1], 1)


def _with_segments(segment: bytes) -> bytes:
    """Return a JPEG with a mebibyte of such segments."""
    whole = encode(random_picture("RGB", (16, 16), 1), "JPEG")
    return whole[:2] + segment * (2**20 // len(segment)) + whole[2:]


@cache
def packed_zeros(num_bytes: int = 200_000_000) -> bytes:
    return zlib.compress(bytes(num_bytes), 9)


# Made when they are needed, as every worker imports this.
BOMBS: dict[str, tuple[Callable[[], bytes], type[PictureError]]] = {
    "giant": (lambda: png_of(2**31 - 1, 2**31 - 1), PictureTooLargeError),
    "giant JPEG": (giant_jpeg, PictureTooLargeError),
    "giant when packed out": (lambda: png_of(8001, 8000, (b"IDAT", packed_zeros())), PictureTooLargeError),
    "text that packs out": (lambda: png_of(4, 4, (b"zTXt", b"a\0\0" + packed_zeros())), UnreadablePictureError),
    "profile that packs out": (lambda: png_of(4, 4, (b"iCCP", b"a\0\0" + packed_zeros())), UnreadablePictureError),
    "nothing in it": (lambda: png_of(100, 100), UnreadablePictureError),
    "animated": (endless_gif, UnsupportedPictureError),
    "truncated": (lambda: to_png(draw(1).picture)[:300], UnreadablePictureError),
    "a page": (lambda: b"<html>not found</html>", UnreadablePictureError),
    "EXIF again and again": (lambda: _with_segments(b"\xff\xe1\0\x12Exif\0\0" + bytes(10)), UnreadablePictureError),
    "empty segments": (lambda: _with_segments(b"\xff\xef\0\2"), UnreadablePictureError),
    "fill bytes": (lambda: _with_segments(b"\xff"), UnreadablePictureError),
    "empty chunks": (lambda: png_of(4, 4, *[(b"abCd", b"")] * 2**16), UnreadablePictureError),
    "profiles that pack out": (
        lambda: png_of(4, 4, *[(b"iCCP", b"a\0\0" + packed_zeros(2**20))] * 1000),
        UnreadablePictureError,
    ),
    "a comment without end": (lambda: b"P6 #" + b"a" * 2**20 + b"\n4 4 255\n" + bytes(48), UnreadablePictureError),
}


@pytest.mark.parametrize("name", BOMBS)
def test_hostile_files_are_refused_from_any_source(llm: LLM, server: PictureServer, folder: Path, name: str) -> None:
    make, error = BOMBS[name]
    content = make()
    (folder / "bomb").write_bytes(content)
    places = [to_data_url(content), server.serve(f"/bomb/{name.replace(' ', '-')}", response(content))]
    for url in (*places, (folder / "bomb").as_uri()):
        with pytest.raises(error) as caught:
            llm.chat(ask(at(url), "What?"), GREEDY)
        assert caught.value.field == URL_FIELD
        assert 400 <= caught.value.status < 500


def test_the_configured_pixel_limit_holds_for_the_header_and_the_decoder() -> None:
    png = to_png(random_picture("RGB", (11, 10), 1))
    preparer = RequestPreparer.from_config(Config(max_image_pixels=110))
    assert preparer.prepare_chat(ask(at(to_data_url(png))), GREEDY).engine_request.media
    smaller = RequestPreparer.from_config(Config(max_image_pixels=109))
    with pytest.raises(PictureTooLargeError, match="11 x 10 pixels are 110, at most 109"):
        smaller.prepare_chat(ask(at(to_data_url(png))), GREEDY)
    with pytest.raises(PictureTooLargeError, match="at most 109"):
        PictureJob(png, "picture", {"": None}, ImageProcessorConfig(height=4, width=4), max_pixels=109).run()


def test_a_limit_above_the_default_reaches_the_decoder() -> None:
    preparer = RequestPreparer.from_config(Config(max_image_pixels=65_000_000))
    jobs: list[PictureJob] = []

    def note(job: MakingJob) -> Made:
        assert isinstance(job, PictureJob)
        jobs.append(job)
        return Made({}, (0.0, 0.0))

    prepared = preparer.prepare_chat(ask(by_url(draw(1).picture)), GREEDY)
    prepared.pixels_of(prepared.makeable_media, note)
    assert [job.max_pixels for job in jobs] == [65_000_000]


# Over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def preparer() -> Iterator[RequestPreparer]:
    preparer = RequestPreparer.from_config(Config(allowed_media_networks=LOCAL, max_media_bytes=1000))
    yield preparer
    preparer.close()


def body_with(url: str) -> dict[str, Any]:
    return {"model": "m", "messages": ask(at(url), "What?")}


def post(preparer: RequestPreparer, *parts: dict[str, Any]) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(preparer, NO_ENGINE, "m"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/chat/completions", json=body)

    return asyncio.run(send())


@pytest.mark.usefixtures("without_a_resolver")
def test_every_refused_url_has_its_status_code_and_field(preparer: RequestPreparer, server: PictureServer) -> None:
    server.serve("/large", response(bytes(1001)))
    server.serve("/inner", response(b"", 302, Location="http://169.254.169.254/"))
    expected = {
        server.url("/none"): (400, "media_not_fetched"),
        server.url("/large"): (413, "media_too_large"),
        server.url("/inner"): (400, "media_refused"),
        "http://[::1]/": (400, "media_refused"),
        "http://10.0.0.1/": (400, "media_refused"),
        "file:///etc/passwd": (400, "media_refused"),
        "https://pictures.invalid/": (400, "media_refused"),
        "ftp://example.org/": (400, "unsupported_field"),
        to_data_url(bytes(1001)): (413, "media_too_large"),
    }
    for url, (status, code) in expected.items():
        answer = post(preparer, at(url))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, URL_FIELD), url


def test_nothing_is_downloaded_for_a_request_with_media_that_the_model_does_not_take(
    preparer: RequestPreparer, server: PictureServer
) -> None:
    film = server.serve("/film", response(b"film"))
    answer = post(preparer, at(film), {"type": "video_url", "video_url": {"url": film}})
    assert answer.status_code == 400
    assert "this model takes none" in answer.json()["error"]["message"]
    assert server.num_asked("/film") == 0


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"<!DOCTYPE html><html><body><svg></svg>Log in</body></html>", "but a web page"),
        (b"\xef\xbb\xbf\n<HTML>Log in</HTML>", "but a web page"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "but an SVG: send it as PNG"),
        (b'<?xml version="1.0"?><!-- drawn --><svg xmlns="http://www.w3.org/2000/svg"/>', "but an SVG: send it as PNG"),
        (b'<?xml version="1.0"?><Error><Code>Secret</Code></Error>', "if they come from a URL, it is not that of the"),
    ],
)
def test_what_came_in_a_picture_s_place_is_named_but_not_shown(
    preparer: RequestPreparer, server: PictureServer, content: bytes, hint: str
) -> None:
    for url in (server.serve("/a", response(content)), to_data_url(content)):
        message = post(preparer, at(url)).json()["error"]["message"]
        assert hint in message
        assert "Log in" not in message
        assert "Secret" not in message


def test_a_download_and_reading_its_bytes_are_one_stage(preparer: RequestPreparer, server: PictureServer) -> None:
    url = server.serve("/stage.png", response(to_png(draw(6).picture)))
    answer = Client(preparer, FakeEngine(preparer)).chat(messages=ask(at(url)), keepsight={"account": True})
    [account] = answer.json()["keepsight"]["accounts"]
    [fetch] = [each for each in account["stages"] if each["stage"] == "fetch"]
    assert fetch["begin_ms"] >= 0


def test_a_disconnected_client_s_downloads_are_cancelled(preparer: RequestPreparer, server: PictureServer) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        requested, disconnected, download_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def hold(origin: Asked, _writer: asyncio.StreamWriter) -> None:
            loop.call_soon_threadsafe(requested.set)
            while not origin.has_left():
                await asyncio.sleep(0.005)
            loop.call_soon_threadsafe(download_ended.set)

        body = json.dumps(body_with(server.serve("/held", hold))).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(_message: object) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        running = asyncio.ensure_future(create_app(preparer, NO_ENGINE, "m")(scope, receive, send))
        async with asyncio.timeout(20):
            await requested.wait()
            disconnected.set()
            await running
            await download_ended.wait()

    asyncio.run(run())
