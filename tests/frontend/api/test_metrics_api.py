"""A server's metrics and state, who may read them, and the account of an answer."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from keepsight.api_settings import ApiSettings
from keepsight.frontend.api.app import SEES_NOTHING, create_app
from keepsight.observe.account import RequestAccount, ShownItem
from keepsight.observe.account_ring import AccountRing
from keepsight.observe.catalogue import DECODED, ENCODER, PROCESSOR, RESPONSES, slot_of
from keepsight.observe.counters import Counters
from keepsight.observe.server_view import ServerView
from keepsight.requests import TierStatus
from tests.frontend.api.app_client import MODEL, Client, FakeEngine, error_of


@dataclass
class Watched(Client):
    view: ServerView = SEES_NOTHING
    counters: Counters = field(default_factory=Counters)

    def make_app(self) -> ASGIApp:
        return create_app(self.preparer, self.engine, MODEL, self.settings, view=self.view, counters=self.counters)


@pytest.fixture
def watched(engine: FakeEngine, tmp_path: Path) -> Watched:
    """Two frontends with their counters and answers; they share one processor cache."""
    for rank in range(2):
        counters = Counters.open(tmp_path, f"frontend-{rank}")
        counters.add(DECODED["image"], 2)
        counters.add(DECODED["video"])
        counters.add(ENCODER["disk"].hits["image"], 2)
        counters.add(ENCODER["disk"].hits["video"], 1)
        counters.set(slot_of("num_requests_waiting"), rank + 1)
        ring = AccountRing.open(tmp_path, f"frontend-{rank}")
        ring.put(RequestAccount(f"request-{rank}", [ShownItem("hash", 256)], 300).describe())
    return Watched(engine.preparer, engine, view=ServerView.of_server(tmp_path, lambda: {PROCESSOR.entries: 7}))


def test_metrics_are_those_of_all_frontends(watched: Watched) -> None:
    response = watched.send("GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    assert 'keepsight_media_decoded_total{modality="image"} 4' in lines
    assert 'keepsight_media_decoded_total{modality="video"} 2' in lines
    assert 'keepsight_cache_hits_total{cache="encoder",tier="disk",modality="video"} 2' in lines
    assert 'keepsight_cache_entries{cache="processor",tier="host",modality="all"} 7' in lines


def test_refused_requests_are_counted_and_monitoring_is_not(watched: Watched) -> None:
    watched.settings = ApiSettings(max_waiting_requests=0)
    assert watched.chat().status_code == 503
    assert watched.send("GET", "/v1/nothing").status_code == 404
    assert watched.send("GET", "/v1/models").status_code == 200
    assert watched.send("GET", "/ready").status_code == 503
    assert watched.send("GET", "/metrics").status_code == 200
    numbers = watched.counters.numbers()
    assert {digit: numbers[slot] for digit, slot in RESPONSES.items()} == {2: 1, 3: 0, 4: 1, 5: 1}


def test_the_state_has_caches_work_and_the_last_requests(watched: Watched) -> None:
    watched.engine.tiers = {0: (TierStatus("encoder", "disk", "the disk is full", 1, 2, 3, 4, 5, 6),)}
    state = watched.send("GET", "/debug/state").json()
    [disk] = [each for each in state["caches"] if (each["cache"], each["tier"]) == ("encoder", "disk")]
    assert (disk["hits"], disk["reason"]) == (6, "the disk is full")
    assert (state["running"], state["waiting"]) == (0, 3)
    assert {each["reason"] for each in state["caches"] if each is not disk} == {None}
    assert state["media"] == {"fetched": 0, "decoded": 6, "preprocessed": 0, "transferred": 0, "encoded": 0}
    assert [each["id"] for each in state["requests"]] == ["request-1", "request-0"]


def test_a_request_is_found_by_its_id_whichever_frontend_answered_it(watched: Watched) -> None:
    assert len(watched.send("GET", "/debug/requests").json()["data"]) == 2
    [found] = watched.send("GET", "/debug/requests/request-0").json()["data"]
    assert (found["id"], found["prompt_tokens"]) == ("request-0", 300)
    assert watched.send("GET", "/debug/requests/request-2").status_code == 404


@pytest.mark.parametrize(
    ("limit", "status"), [("1", 200), ("0", 400), ("-1", 400), ("1001", 400), ("x", 400), ("0" * 5000 + "1", 400)]
)
def test_the_number_of_listed_requests_has_limits(watched: Watched, limit: str, status: int) -> None:
    response = watched.send("GET", f"/debug/requests?limit={limit}")
    assert response.status_code == status
    assert status != 200 or len(response.json()["data"]) == 1


@pytest.mark.parametrize("path", ["/debug/state", "/debug/requests"])
def test_an_invalid_number_is_refused_before_anything_is_read(watched: Watched, path: str) -> None:
    def never() -> Any:
        raise AssertionError("it was read")

    watched.view = ServerView(never, never)
    assert watched.send("GET", f"{path}?limit=0").status_code == 400


@pytest.mark.parametrize("path", ["/debug/state", "/debug/requests"])
def test_an_unknown_parameter_is_refused_and_the_known_are_named(watched: Watched, path: str) -> None:
    response = watched.send("GET", f"{path}?limt=5")
    assert (error_of(response), "known: limit" in response.text) == ((400, "limt", "unsupported_field"), True)


def test_metrics_and_state_require_the_right_key(watched: Watched) -> None:
    watched.settings = ApiSettings(api_keys=("key",), admin_api_key="admin")
    statuses = {
        (path, key): watched.send("GET", path, headers={"authorization": f"Bearer {key}"}).status_code
        for path in ("/metrics", "/debug/state", "/debug/requests")
        for key in ("key", "admin", "other")
    }
    assert {key: status for (path, key), status in statuses.items() if path == "/metrics"} == {
        "key": 200,
        "admin": 200,
        "other": 401,
    }
    for path in ("/debug/state", "/debug/requests"):
        assert (statuses[path, "key"], statuses[path, "admin"]) == (401, 200)


# Answers ------------------------------------------------------------------------------------------------------


def test_an_answer_has_its_account_only_on_request(client: Client) -> None:
    assert "keepsight" not in client.chat().json()
    assert "keepsight" not in client.chat(keepsight={"account": False}).json()
    response = client.chat(keepsight={"account": True}, headers={"x-request-id": "mine"})
    [account] = response.json()["keepsight"]["accounts"]
    assert account["id"] == "mine"
    assert [each["stage"] for each in account["stages"]] == ["identify"]


def test_a_stream_has_its_account_before_its_last_event(client: Client) -> None:
    options = {"keepsight": {"account": True}, "stream_options": {"include_usage": True}}
    *others, with_account, last = client.stream(**options)
    assert not any("keepsight" in each for each in others)
    assert with_account["choices"] == []
    assert with_account["usage"] is None
    assert len(with_account["keepsight"]["accounts"]) == 1
    assert last["usage"]["completion_tokens"] == 6
    assert "keepsight" in client.stream(keepsight={"account": True})[-1]


def test_each_prompt_of_a_completion_has_an_account(client: Client) -> None:
    body = {"model": MODEL, "prompt": ["a", "b"], "keepsight": {"account": True}}
    accounts = client.send("POST", "/v1/completions", json=body).json()["keepsight"]["accounts"]
    assert len(accounts) == 2
    assert accounts[0]["id"] == accounts[1]["id"]


@pytest.mark.parametrize("options", [{"acount": True}, {"account": 1}, []])
def test_unknown_fields_beside_openai_s_are_refused(client: Client, options: object) -> None:
    response = client.chat(keepsight=options)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("keepsight")


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_has_the_server_s_processing_time(client: Client, stream: bool) -> None:
    timing = client.chat(stream=stream).headers["server-timing"]
    assert timing.startswith("identify;dur=")


def test_an_answer_with_an_account_is_valid_json(client: Client) -> None:
    assert json.loads(client.chat(keepsight={"account": True}).text)["object"] == "chat.completion"
