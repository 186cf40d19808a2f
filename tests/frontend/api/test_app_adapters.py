"""An adapter is served as a model under its own name, wherever a request may name a model."""

from typing import Any

import pytest
import torch

from keepsight.api_settings import ApiSettings
from keepsight.config import Config
from keepsight.frontend.prepare_request import RequestPreparer
from tests.adapter_folders import write_adapter
from tests.frontend.api.app_client import HELLO, MODEL, Client, FakeEngine, error_of, events_of

NAME = "sql/of mine"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": ["Hello", "Good day"]},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 8},
}


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> RequestPreparer:
    folder = write_adapter(tmp_path_factory.mktemp("adapter"), {"any": torch.ones(1)})
    modules = [{"name": name, "path": folder} for name in (NAME, "other")]
    return RequestPreparer.from_config(Config(enable_lora=True, lora_modules=modules))


@pytest.fixture
def client(preparer: RequestPreparer) -> Client:
    settings = ApiSettings(more_model_names=("second",), adapter_parents={"other": "published"})
    return Client(preparer, FakeEngine(preparer), settings)


@pytest.mark.parametrize("path", BODIES)
def test_a_request_for_an_adapter_uses_it_and_is_answered_in_its_name(client: Client, path: str) -> None:
    for model, adapter in ((NAME, NAME), (MODEL, None), ("second", None)):
        body = client.send("POST", path, json={"model": model, **BODIES[path]}).json()
        assert body["model"] == (adapter or MODEL)
        asked = client.engine.requests[-1].adapter
        assert asked == (None if adapter is None else client.preparer.adapters[NAME])


def test_a_stream_has_the_adapter_s_name_too(client: Client) -> None:
    streamed = client.send("POST", "/v1/chat/completions", json={"model": NAME, "messages": HELLO, "stream": True})
    assert {event["model"] for event in events_of(streamed)} == {NAME}


def test_the_account_and_the_log_name_the_adapter(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "keepsight")
    body = {"model": NAME, "messages": HELLO, "keepsight": {"account": True}}
    [account] = client.send("POST", "/v1/chat/completions", json=body).json()["keepsight"]["accounts"]
    assert account["adapter"] == NAME
    assert f"; adapter: {NAME!r}; ms: " in caplog.text


def test_an_adapter_is_listed_with_its_base_model(client: Client) -> None:
    listed = client.send("GET", "/v1/models").json()["data"]
    assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
        (MODEL, MODEL, None), ("second", MODEL, None), (NAME, NAME, MODEL), ("other", "other", "published")
    ]  # fmt: skip
    shown = client.send("GET", f"/v1/models/{NAME}").json()
    # Each of the two was sent to a server of its own.
    started = {"created": 0, "created_at": ""}
    assert shown | started == listed[2] | started


def test_tokenize_accepts_every_served_name_and_no_other(client: Client) -> None:
    for body in ({"prompt": "Hello"}, {"messages": HELLO}):
        bodies = [client.send("POST", "/tokenize", json={"model": name, **body}).json() for name in (NAME, MODEL)]
        assert bodies[0] == bodies[1]
        unknown = client.send("POST", "/tokenize", json={"model": "mine", **body})
        assert error_of(unknown) == (404, "model", "model_not_found")
        assert repr(NAME) in unknown.json()["error"]["message"]
