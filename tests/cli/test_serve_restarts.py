"""A server that was killed and started again has all its pictures on the disk: none is decoded, none is encoded."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.cli.test_serve import answer
from tests.drawn import Drawn, ask, by_url, draw
from tests.real_server import serving

SOON = 30


def tiers_of(port: int) -> dict[str, dict[str, Any]]:
    told = httpx.get(f"http://127.0.0.1:{port}/health", timeout=SOON).json()
    return {tier["name"]: tier for tier in told.get("tiers", ())}


def wait_for_tier(port: int, name: str, field: str, value: int) -> dict[str, Any]:
    deadline = time.monotonic() + SOON
    while (tier := tiers_of(port).get(name, {})).get(field, 0) < value:
        assert time.monotonic() < deadline, tier
        time.sleep(0.05)
    return tier


def answers_of(port: int, pictures: Sequence[Drawn]) -> list[str]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        return [answer(client, ask(by_url(each.picture), each.questions[0].text), max_tokens=8) for each in pictures]


def restart(folder: Path, place: str, pictures: Sequence[Drawn]) -> None:
    """Asks about all pictures, kills the server, and asks the next one."""
    options = ("--encoder-disk-cache", place, "--media-workers", "1")
    with serving(folder / "first", *options) as (process, port):
        first = answers_of(port, pictures)
        assert wait_for_tier(port, "disk", "num_entries", len(pictures))["num_hits"] == 0
        assert num_kept_pixels(process.pid) == len(pictures)
        process.kill()
    with serving(folder / "second", *options) as (process, port):
        assert answers_of(port, pictures) == first
        # Each was given by the disk, so none was encoded; and none encoded, none was asked for.
        disk = wait_for_tier(port, "disk", "num_hits", len(pictures))
        assert (disk["num_hits"], disk["num_entries"], disk["status"]) == (len(pictures), len(pictures), "ok")
        assert num_kept_pixels(process.pid) == 0


def num_kept_pixels(supervisor_pid: int) -> int:
    """In the processor cache that all processes share: of each picture that was decoded."""
    opened = (link.readlink() for link in Path(f"/proc/{supervisor_pid}/fd").iterdir())
    run_directory = next(path for path in opened if path.name.startswith("keepsight-"))
    return len(list((run_directory / "pixels").iterdir()))


def test_after_kill_9_nothing_is_decoded_or_encoded_again(tmp_path: Path) -> None:
    restart(tmp_path, f"{tmp_path / 'cache'}:64M", [draw(seed) for seed in range(4)])
