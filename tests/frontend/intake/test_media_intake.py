"""Parts with URLs become parts with bytes; downloads are shared, limited and canceled. Uses a real server and real
threads."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from keepsight.config import Config
from keepsight.errors import (
    MediaFetchError,
    MediaRefusedError,
    MediaTimeoutError,
    MediaTooLargeError,
    PictureError,
    TooManyPicturesError,
)
from keepsight.frontend.intake.downloads import MAX_DOWNLOADS_AT_ONCE
from keepsight.frontend.intake.local_files import LocalFiles
from keepsight.frontend.intake.media_intake import MediaIntake
from keepsight.frontend.intake.media_limits import RequestBytes
from keepsight.frontend.prompt.read_messages import PicturePart
from tests.drawn import to_data_url
from tests.frontend.picture_server import LOCAL, Asked, PictureServer, picture_server, response
from tests.wait_until import wait_until


@pytest.fixture
def server() -> Iterator[PictureServer]:
    with picture_server() as server:
        yield server


def intake_with(**options: Any) -> "closing[MediaIntake]":
    return closing(MediaIntake(Config(allowed_media_networks=LOCAL, **options)))


def parts_of(*sources: object) -> list[PicturePart]:
    return [PicturePart(source, f"part[{index}]") for index, source in enumerate(sources)]


def fetch(intake: MediaIntake, *sources: object, salt: str | None = None) -> list[object]:
    return [part.source for part in intake.fetch_all(parts_of(*sources), salt)]


class Gate:
    """An origin that answers once the test opens the gate."""

    def __init__(self) -> None:
        self.num_left = self.num_waiting = self.most_waiting = 0
        self._opened, self._changed = threading.Event(), threading.Condition()

    def open(self) -> None:
        self._opened.set()

    async def answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        while not self._opened.is_set() and not asked.has_left():
            await asyncio.sleep(0.005)
        self.num_waiting -= 1
        if asked.has_left():
            with self._changed:
                self.num_left += 1
                self._changed.notify_all()
        else:
            writer.write(response(b"picture"))

    def wait_until_left(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_left > 0, timeout=20)


# Every source -------------------------------------------------------------------------------------------------


def test_parts_come_back_with_their_bytes_in_their_order(server: PictureServer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"from a file")
    url, picture = server.serve("/a", response(b"from the network")), Image.new("RGB", (2, 2))
    with intake_with(allowed_local_media_path=tmp_path) as intake:
        sources = [picture, url, to_data_url(b"from the text"), (tmp_path / "a.png").as_uri(), b"as it is", None, url]
        fetched = fetch(intake, *sources)
    texts = [b"from the network", b"from the text", b"from a file", b"as it is"]
    assert fetched == [picture, *texts, None, b"from the network"]
    assert server.num_asked("/a") == 1


def test_a_request_reads_a_file_once_and_counts_it_wherever_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, read, num_read = (tmp_path / "a.png").as_uri(), LocalFiles.read, itertools.count()

    def count_read(files: LocalFiles, *args: Any) -> bytes:
        next(num_read)
        return read(files, *args)

    monkeypatch.setattr(LocalFiles, "read", count_read)
    (tmp_path / "a.png").write_bytes(b"from a file")
    with intake_with(allowed_local_media_path=tmp_path, max_request_media_bytes=2 * 11) as intake:
        assert fetch(intake, url, url) == [b"from a file"] * 2
        with pytest.raises(MediaTooLargeError, match="more than the 22 bytes that all may have") as caught:
            fetch(intake, url, url, url)
    assert (caught.value.field, next(num_read)) == ("part[2]", 2)


def test_nothing_is_read_once_a_request_has_too_many_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"from a file")
    with intake_with(allowed_local_media_path=tmp_path, max_request_media_bytes=20) as intake:
        missing = (tmp_path / "missing.png").as_uri()
        with pytest.raises(MediaTooLargeError, match="more than the 20 bytes that all may have") as caught:
            fetch(intake, b"sent along", (tmp_path / "a.png").as_uri(), missing)
    assert caught.value.field == "part[1]"


def download_threads() -> set[threading.Thread]:
    """Return all download threads, also those of other tests' intakes that are not collected yet."""
    return {thread for thread in threading.enumerate() if thread.name == "downloads"}


def test_without_urls_no_thread_is_begun() -> None:
    before = download_threads()
    with intake_with() as intake:
        fetch(intake, to_data_url(b"text"), b"bytes")
        assert not download_threads() - before


def test_closed_it_leaves_no_thread_and_no_connection(server: PictureServer) -> None:
    before = download_threads()
    with intake_with() as intake:
        fetch(intake, server.serve("/a", response(b"picture")))
        assert len(download_threads() - before) == 1
    assert not download_threads() - before
    with pytest.raises(RuntimeError, match="closed"):
        fetch(intake, server.url("/a"))


def test_forgotten_it_leaves_no_thread_either(server: PictureServer) -> None:
    before = download_threads()
    intake = MediaIntake(Config(allowed_media_networks=LOCAL))
    fetch(intake, server.serve("/a", response(b"picture")))
    [thread] = download_threads() - before
    del intake
    gc.collect()
    thread.join(timeout=20)
    assert not thread.is_alive()


# Errors -------------------------------------------------------------------------------------------------------


def test_a_fault_has_the_field_of_the_picture_that_has_it(server: PictureServer) -> None:
    good = server.serve("/good", response(b"picture"))
    with intake_with() as intake:
        for bad in (server.url("/none"), "http://169.254.169.254/", "ftp://a/", "file:///etc/hostname", "cat.png"):
            with pytest.raises(PictureError if ":" in bad and "ftp" not in bad else Exception) as caught:
                fetch(intake, good, bad, good)
            assert caught.value.field == "part[1]"  # type: ignore[attr-defined]


def test_private_places_are_refused_unless_they_are_listed(server: PictureServer) -> None:
    url = server.serve("/a", response(b"picture"))
    with (
        closing(MediaIntake(Config())) as intake,
        pytest.raises(MediaRefusedError, match="not found on the public"),
    ):
        fetch(intake, url)
    with (
        intake_with(allowed_media_domains=["pictures.test"]) as intake,
        pytest.raises(MediaRefusedError, match="hosts"),
    ):
        fetch(intake, url)
    assert not server.asked


def test_an_origin_that_fails_is_asked_again_by_the_next_request(server: PictureServer) -> None:
    url = server.serve("/a", response(b"", 500), response(b"picture"))
    with intake_with() as intake:
        with pytest.raises(MediaFetchError, match="answered 500"):
            fetch(intake, url)
        assert fetch(intake, url) == [b"picture"]


# Limits -------------------------------------------------------------------------------------------------------


def test_too_many_pictures_are_refused_before_any_is_fetched(server: PictureServer) -> None:
    url = server.serve("/a", response(b"picture"))
    with intake_with(limit_mm_per_prompt={"image": 2}) as intake:
        assert len(fetch(intake, url, b"other")) == 2
        with pytest.raises(TooManyPicturesError):
            fetch(intake, *[server.url(f"/{number}") for number in range(3)])
        with pytest.raises(TooManyPicturesError):
            intake.find_remote(parts_of(b"1", b"2", url))
    assert len(server.asked) == 1


@pytest.mark.parametrize("kind", ["url", "data", "file", "bytes", "bytearray", "memoryview"])
def test_bytes_have_their_limits_wherever_they_come_from(server: PictureServer, tmp_path: Path, kind: str) -> None:
    def source_of(content: bytes, number: int) -> object:
        (tmp_path / str(number)).write_bytes(content)
        server.serve(f"/{number}", response(content))
        return {
            "url": server.url(f"/{number}"),
            "data": to_data_url(content),
            "file": (tmp_path / str(number)).as_uri(),
            "bytes": content,
            "bytearray": bytearray(content),
            "memoryview": memoryview(content),
        }[kind]

    options = {"max_media_bytes": 100, "max_request_media_bytes": 250, "allowed_local_media_path": tmp_path}
    with intake_with(**options) as intake:
        sources = [source_of(bytes(size), number) for number, size in enumerate((100, 100, 50, 1))]
        assert len(fetch(intake, *sources[:3])) == 3
        with pytest.raises(MediaTooLargeError, match="more than the 250 bytes that all may have"):
            fetch(intake, *sources)
        with pytest.raises(MediaTooLargeError, match=r"100") as caught:
            fetch(intake, b"", source_of(bytes(101), 9))
        assert (caught.value.field, caught.value.status) == ("part[1]", 413)


def test_a_request_waits_no_longer_than_its_time_for_all_of_its_pictures(server: PictureServer) -> None:
    gate = Gate()
    urls = [server.serve(f"/{number}", gate.answer) for number in range(20)]
    with (
        intake_with(media_fetch_timeout=0.2) as intake,
        pytest.raises(MediaTimeoutError, match=r"0\.2 seconds") as caught,
    ):
        fetch(intake, *urls)
    assert caught.value.field == "part[0]"


def test_what_comes_at_the_last_moment_is_in_time(server: PictureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    count, limit, limits = RequestBytes.add, asyncio.timeout, list[asyncio.Timeout]()

    def limit_to(seconds: float | None) -> asyncio.Timeout:
        limits.append(limit(seconds))
        return limits[-1]

    def count_at_the_last_moment(*arguments: Any) -> None:
        count(*arguments)
        # The last step of the download: after it, the request's timeout, which began first, has expired.
        if not limits[0].expired():
            limits[0].reschedule(0)

    monkeypatch.setattr(asyncio, "timeout", limit_to)
    monkeypatch.setattr(RequestBytes, "add", count_at_the_last_moment)
    with intake_with() as intake:
        assert fetch(intake, server.serve("/a", response(b"picture"))) == [b"picture"]
    assert limits[0].expired()


def test_a_request_asks_for_some_at_a_time_so_that_nobody_is_flooded_in_its_name(server: PictureServer) -> None:
    gate = Gate()
    urls = [server.serve(f"/{number}", gate.answer) for number in range(20)]
    with intake_with() as intake, ThreadPoolExecutor(1) as thread:
        fetched = thread.submit(fetch, intake, *urls)
        wait_until(lambda: len(server.asked) == MAX_DOWNLOADS_AT_ONCE)
        gate.open()
        assert fetched.result(20) == [b"picture"] * 20
    assert gate.most_waiting == MAX_DOWNLOADS_AT_ONCE


def test_the_rest_of_a_request_is_given_up_when_one_of_it_fails(server: PictureServer) -> None:
    gate = Gate()

    async def fail_when_the_other_is_asked(_: Asked, writer: asyncio.StreamWriter) -> None:
        while not gate.num_waiting:
            await asyncio.sleep(0.005)
        writer.write(response(status=404))

    with intake_with() as intake:
        with pytest.raises(MediaFetchError, match="404"):
            fetch(intake, server.serve("/slow", gate.answer), server.serve("/none", fail_when_the_other_is_asked))
        gate.wait_until_left()


# Shared downloads ---------------------------------------------------------------------------------------------


def test_fifty_requests_for_one_url_are_one_download(server: PictureServer) -> None:
    gate = Gate()
    url, other = server.serve("/a", gate.answer), server.serve("/other", response(b"other"))

    async def run(intake: MediaIntake) -> None:
        waiting = [asyncio.create_task(intake.download(parts_of(url), None)) for _ in range(50)]
        await asyncio.sleep(0)  # Each of them starts its request.
        await intake.download(parts_of(other), None)  # Requested after them and done: they are all waiting by now.
        gate.open()
        assert await asyncio.gather(*waiting) == [{url: b"picture"}] * 50

    with intake_with() as intake:
        asyncio.run(run(intake))
    assert server.num_asked("/a") == 1


def test_requests_that_wait_in_an_event_loop_hold_no_threads(server: PictureServer) -> None:
    """More requests wait than any pool has threads, and a quick one still completes."""
    gate = Gate()
    slow, quick = server.serve("/slow", gate.answer), server.serve("/quick", response(b"quick"))

    async def run(intake: MediaIntake) -> None:
        waiting = [asyncio.create_task(intake.download(parts_of(f"{slow}?{number}"), None)) for number in range(50)]
        assert await intake.download(parts_of(quick), None) == {quick: b"quick"}
        num_threads = threading.active_count()
        assert num_threads < 50
        gate.open()
        contents = await asyncio.gather(*waiting)
        assert [list(each.values()) for each in contents] == [[b"picture"]] * 50

    with intake_with() as intake:
        asyncio.run(run(intake))


def test_a_request_that_is_abandoned_ends_its_download(server: PictureServer) -> None:
    gate = Gate()
    url = server.serve("/a", gate.answer)

    async def run(intake: MediaIntake) -> None:
        waiting = asyncio.create_task(intake.download(parts_of(url), None))
        await asyncio.to_thread(wait_until, lambda: server.num_asked("/a") > 0)
        waiting.cancel()
        await asyncio.to_thread(gate.wait_until_left)

    with intake_with() as intake:
        asyncio.run(run(intake))
