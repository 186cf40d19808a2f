"""A real server whose shared memory is too small, runs full, or is read-only: slower, but never wrong."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from keepsight.ipc.run_directory import MIN_FREE_BYTES_OF_FRONTEND, MIN_FREE_BYTES_OF_SERVER
from tests import real_server
from tests.drawn import ask, by_url, draw, to_png
from tests.official_client import answer, connect
from tests.real_server import COMMAND, START_SECONDS, serving
from tests.wait_until import wait_until

PNG = {"content-type": "image/png"}
# A mount namespace of its own, so that `mount` affects no other process.
ELSEWHERE = ["unshare", "--map-root-user", "--mount", "sh", "-ec"]

pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*ELSEWHERE, "mount -t tmpfs x /dev/shm"]).returncode != 0,
    reason="mounting is not allowed here",
)


@contextmanager
def serving_with(
    mount_options: str, log: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> Iterator[tuple[int, openai.OpenAI]]:
    mount = f'mount -t tmpfs -o {mount_options} x /dev/shm && exec "$@"'
    monkeypatch.setattr(real_server, "COMMAND", [*ELSEWHERE, mount, "sh", *COMMAND])
    with (
        serving(log, *options) as (process, port),
        connect(port) as client,
    ):
        yield process.pid, client


def assert_right_answers(client: openai.OpenAI) -> None:
    for drawn in (draw(1), draw(2), draw(1)):
        assert answer(client, ask(by_url(drawn.picture), drawn.questions[0].text)) == drawn.description


def write_until_full(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.parametrize(
    ("mount_options", "message"),
    [
        ("size=7m", "lru instead of shared: shared memory has"),
        ("ro", "lru instead of shared: there is no shared memory"),
    ],
)
def test_without_room_in_shared_memory_pixels_are_cached_privately(
    mount_options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    with serving_with(mount_options, log, monkeypatch, "--mm-processor-cache-gb", "0.1") as (_, client):
        assert message in log.read_text()
        assert_right_answers(client)
    assert "Traceback" not in log.read_text()


CHOOSE = """
import logging
from keepsight.config import Config
from keepsight.ipc.pixel_mode import choose_mode
from keepsight.ipc.run_directory import RunDirectory

logging.basicConfig(level=logging.INFO)
with RunDirectory.create(num_frontends=1) as directory:
    choose_mode(Config(mm_processor_cache_gb=0.1), 1, directory)
"""


@pytest.mark.parametrize("mount_options", ["size=1m", "size=64m,nr_inodes=20", "ro"])
def test_too_little_is_like_none(mount_options: str) -> None:
    """A server's pixels, and its other files, are then kept as where shared memory is read-only."""
    mount = f'mount -t tmpfs -o {mount_options} x /dev/shm && exec "$@"'
    done = subprocess.run([*ELSEWHERE, mount, "sh", sys.executable, "-c", CHOOSE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "lru instead of shared: there is no shared memory" in done.stderr


def test_the_required_shared_memory_suffices_for_the_start_and_an_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, size = tmp_path / "log", MIN_FREE_BYTES_OF_SERVER + 2 * MIN_FREE_BYTES_OF_FRONTEND
    with serving_with(f"size={size}", log, monkeypatch, "--api-server-count", "2") as (_, client):
        picture = to_png(draw(1).picture)
        uploaded = httpx.post(f"{client.base_url}media", content=picture, headers=PNG, timeout=START_SECONDS)
        assert uploaded.status_code == 200, uploaded.text
    assert "shared memory has" in log.read_text()
    assert " WARNING " not in log.read_text()


def create_files_until_full(path: Path) -> None:
    for number in itertools.count():
        path.with_suffix(f".{number}").touch()


def kill_the_frontend(log: Path) -> None:
    """Kill the frontend and wait until its successor is ready."""
    [pid] = re.findall(r"frontend-1 \(pid (\d+)\) is ready", log.read_text())
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: re.search(r"frontend-2 \(pid \d+\) is ready", log.read_text()))


@pytest.mark.parametrize("fill", [write_until_full, create_files_until_full])
def test_requests_are_answered_after_shared_memory_fills_up(
    fill: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, options = tmp_path / "log", ("--mm-processor-cache-gb", "0.005")
    with serving_with("size=11m,nr_inodes=100", log, monkeypatch, *options) as (pid, client):
        with pytest.raises(OSError, match="No space left"):
            fill(Path(f"/proc/{pid}/root/dev/shm/others"))
        assert_right_answers(client)
        assert "the store cannot be written: [Errno 28]" in log.read_text()
        kill_the_frontend(log)
        assert_right_answers(client)
    assert not re.search("Traceback|nothing can be uploaded|keeps no responses", log.read_text())
