"""After kill -9, the next server reuses the first one's results from a disk or Redis tier; nothing is recomputed."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.redis_tier import RedisTier
from tests.drawn import Drawn, ask, by_url, draw, to_png
from tests.official_client import answer, complete, connect
from tests.real_server import run_directory_of, serving
from tests.tiers.redis_servers import REAL, real_server
from tests.wait_until import wait_until

SOON = 30


def tiers_of(port: int) -> dict[str, dict[str, Any]]:
    body = httpx.get(f"http://127.0.0.1:{port}/health", timeout=SOON).json()
    return {tier["name"]: tier for tier in body.get("tiers", ())}


def wait_until_written(tier: DiskTier | RedisTier, count: int) -> None:
    wait_until(lambda: len(tier.list_sizes()) == count)


def wait_for_hits(port: int, name: str, count: int) -> dict[str, Any]:
    """Wait for a tier's hits; an engine that has done nothing yet reports no tiers."""
    wait_until(lambda: name in (tiers := tiers_of(port)) and tiers[name]["num_hits"] >= count)
    return tiers_of(port)[name]


def answers_of(port: int, pictures: Sequence[Drawn], at_once: int = 1) -> list[str]:
    """Return the answer to each picture's first question; raise if one fails."""
    with connect(port) as client, ThreadPoolExecutor(at_once) as threads:
        conversations = [ask(by_url(each.picture), each.questions[0].text) for each in pictures]
        return list(threads.map(lambda messages: answer(client, messages, max_tokens=8), conversations))


def answer_first(supervisor: int, port: int, tier: DiskTier | RedisTier, pictures: Sequence[Drawn]) -> list[str]:
    """Ask a server about pictures that are new to it and to the tier."""
    first = answers_of(port, pictures)
    wait_until_written(tier, len(pictures))
    assert wait_for_hits(port, tier.name, 0)["num_hits"] == 0
    assert num_kept_pixels(supervisor) == len(pictures)
    return first


def check_all_is_found(supervisor: int, port: int, tier: DiskTier | RedisTier, num_pictures: int) -> None:
    """Check that the tier supplied each embedding, so no picture was encoded and no pixels were needed."""
    found = wait_for_hits(port, tier.name, num_pictures)
    assert (found["num_hits"], found["status"]) == (num_pictures, "ok")
    assert num_kept_pixels(supervisor) == 0


def restart_from_disk(folder: Path, pictures: Sequence[Drawn]) -> None:
    """Ask about all pictures, kill the server, and ask the next one, which finds everything on the disk."""
    directory, max_bytes = folder / "cache", 2**30
    tier, options = DiskTier(directory, max_bytes), ("--encoder-disk-cache", f"{directory}:{max_bytes}")
    with serving(folder / "first", *options) as (process, port):
        first = answer_first(process.pid, port, tier, pictures)
        process.kill()
    with serving(folder / "second", *options) as (process, port):
        assert answers_of(port, pictures) == first
        check_all_is_found(process.pid, port, tier, len(pictures))
        assert len(tier.list_sizes()) == len(pictures)


def share_by_redis(folder: Path, pictures: Sequence[Drawn]) -> None:
    """Run two servers in sequence; the second's Redis is killed while it answers."""
    with real_server() as (url, redis):
        tier, options, some = RedisTier(url), ("--encoder-remote-cache", url), len(pictures) // 4
        with serving(folder / "first", *options) as (process, port):
            first = answer_first(process.pid, port, tier, pictures)
            process.kill()
        with serving(folder / "second", *options) as (process, port), ThreadPoolExecutor(1) as thread:
            assert answers_of(port, pictures[:some]) == first[:some]
            check_all_is_found(process.pid, port, tier, some)
            assert len(tier.list_sizes()) == len(pictures)
            answers = thread.submit(answers_of, port, pictures[some:], 4)
            redis.kill()
            assert answers.result() == first[some:]
            assert tiers_of(port)[tier.name]["num_hits"] < len(pictures)


def num_kept_pixels(supervisor_pid: int) -> int:
    """Return the number of entries in the shared processor cache: one for each decoded picture."""
    return len(list((run_directory_of(supervisor_pid) / "pixels").iterdir()))


def upload(port: int, drawn: Drawn, **query: Any) -> dict[str, Any]:
    url, headers = f"http://127.0.0.1:{port}/v1/media", {"content-type": "image/png"}
    response = httpx.post(url, content=to_png(drawn.picture), headers=headers, params=query, timeout=SOON)
    assert response.status_code == 200, response.text
    uploaded: dict[str, Any] = response.json()
    return uploaded


def find(port: int, drawn: Drawn, **query: Any) -> dict[str, Any]:
    """Upload a picture until a tier is said to hold it: an engine that does not answer within a second is left out."""
    told: list[dict[str, Any]] = []

    def is_found() -> bool:
        told.append(upload(port, drawn, **query)["tiers"])
        return bool(told[-1]["embeddings"])

    wait_until(is_found)
    return told[-1]


@dataclass(frozen=True)
class Restarted:
    """The second of two servers with the same folder, and what the first had answered when it was killed."""

    supervisor: int
    port: int
    tier: DiskTier
    answers: list[str]

    def num_hits(self) -> int:
        return int(tiers_of(self.port)["disk"]["num_hits"])


ASKED, UPLOADED, UNKNOWN = [draw(seed) for seed in range(4)], draw(20), draw(21)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    folder = tmp_path_factory.mktemp("restarted")
    tier, options = DiskTier(folder / "cache", 2**30), ("--encoder-disk-cache", f"{folder}/cache:1G")
    with serving(folder / "first", *options, "--media-workers", "1") as (process, port):
        answers = answer_first(process.pid, port, tier, ASKED)
        tiers = find(port, UPLOADED, warm=True)
        assert (tiers["embeddings"][0], tiers["prefix"]) == ("device", True)
        wait_until_written(tier, len(ASKED) + 1)
        wait_until(lambda: find(port, UPLOADED)["embeddings"][-1] == "disk")
        process.kill()
    with serving(folder / "second", *options, "--media-workers", "1") as (process, port):
        yield Restarted(process.pid, port, tier, answers)


def test_after_kill_9_an_upload_is_said_to_be_on_disk_before_any_request(restarted: Restarted) -> None:
    assert upload(restarted.port, UNKNOWN)["tiers"]["embeddings"] == []
    tiers = find(restarted.port, UPLOADED)
    assert tiers["embeddings"] == ["disk"]
    assert (tiers["engine"], tiers["prefix"], tiers["processor_cache"]) == (True, False, False)
    wait_until(lambda: "disk" in tiers_of(restarted.port))  # engines report their tiers each half a second
    assert restarted.num_hits() == 0


# The last of these, as it counts what was found from the start.
def test_after_kill_9_nothing_is_decoded_or_encoded_again(restarted: Restarted) -> None:
    assert answers_of(restarted.port, ASKED) == restarted.answers
    check_all_is_found(restarted.supervisor, restarted.port, restarted.tier, len(ASKED))
    assert len(restarted.tier.list_sizes()) == len(ASKED) + 1


def test_after_kill_9_a_conversation_continues_from_the_prefix_disk_cache(tmp_path: Path) -> None:
    """Keys and values come from the disk, so the picture is not needed."""
    tier, pictures = DiskTier(tmp_path / "cache", 2**30), [draw(seed) for seed in range(3)]
    options = ("--prefix-disk-cache", f"{tmp_path}/cache:1G", "--media-workers", "1")
    questions = [ask(by_url(each.picture), "What is in the picture? " * 20) for each in pictures]
    answers = []
    for name, fewest, most in (("first", 0, 16), ("second", 128, 256)):
        with serving(tmp_path / name, *options) as (process, port), connect(port) as client:
            before = [complete(client, messages, max_tokens=8) for messages in questions]
            answers.append([each.choices[0].message.content for each in before])
            cached = [each.usage.prompt_tokens_details.cached_tokens for each in before]
            assert all(fewest <= count <= most for count in cached), cached
            wait_until(lambda: len(tier.list_sizes()) >= 2 * len(pictures))
            assert num_kept_pixels(process.pid) == (len(pictures) if name == "first" else 0)
            process.kill()
    assert answers[0] == answers[1]


@pytest.mark.skipif(REAL is None, reason="NO REAL REDIS: redis-server is not installed")
def test_servers_share_embeddings_by_redis_and_still_answer_when_it_is_killed(tmp_path: Path) -> None:
    share_by_redis(tmp_path, [draw(seed) for seed in range(24)])
