"""A real `keepsight serve`: metrics show that a second request about a picture repeats no work."""

import socket
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.drawn import ask, by_url, draw
from tests.real_server import START_SECONDS

WORK = ("decoded", "preprocessed", "transferred", "encoded")


@pytest.fixture(scope="module")
def url(server_port: int) -> str:
    return f"http://127.0.0.1:{server_port}"


def read_counter(url: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=START_SECONDS).text)
    [value] = (
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"keepsight_{name}" and labels.items() <= sample.labels.items()
    )
    return value


def work_done(url: str) -> dict[str, float]:
    return {work: read_counter(url, f"media_{work}_total", modality="image") for work in WORK}


def request_account(url: str, messages: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 3, "keepsight": {"account": True}}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=START_SECONDS)
    [account] = response.json()["keepsight"]["accounts"]
    assert isinstance(account, dict)
    return account


def test_invalid_http_is_counted_among_refused_requests(server_port: int, url: str) -> None:
    before = read_counter(url, "http_responses_total", status="4xx")
    with socket.create_connection(("127.0.0.1", server_port)) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert read_counter(url, "http_responses_total", status="4xx") == before + 1


def test_a_known_picture_is_neither_decoded_nor_encoded_again_until_the_caches_are_reset(url: str) -> None:
    picture = by_url(draw(4711).picture)
    before = work_done(url)
    first, second = request_account(url, ask(picture, "What is this?")), request_account(url, ask(picture, "How many?"))
    assert first["work"] == dict.fromkeys(WORK, 1)
    assert second["work"] == dict.fromkeys(WORK, 0)
    assert first["media"][0]["answered_by"] == "nobody"
    assert second["media"][0]["answered_by"] in ("encoder", "prefix")
    assert {"decode", "resize", "transfer", "encode"} <= set(second["media"][0]["skipped"])
    assert work_done(url) == {work: count + 1 for work, count in before.items()}
    for cache in ("prefix", "encoder", "mm"):
        assert httpx.post(f"{url}/reset_{cache}_cache", timeout=START_SECONDS).status_code == 200
    assert request_account(url, ask(picture, "And now?"))["work"] == dict.fromkeys(WORK, 1)
    assert work_done(url) == {work: count + 2 for work, count in before.items()}
    shown = httpx.get(f"{url}/debug/requests/{second['id']}", timeout=START_SECONDS).json()["data"]
    assert [each["id"] for each in shown] == [second["id"]]
