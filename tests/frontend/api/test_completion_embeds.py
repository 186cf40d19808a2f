"""`prompt_embeds` of completions, with the app in process: the request made from them, and what is refused."""

from typing import Any

import httpx
import numpy as np
import pytest

from keepsight.config import Config
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.media import TokenSpan
from keepsight.pixels import carried_embeddings
from tests.frontend.api.app_client import MODEL, Client, FakeEngine
from tests.precomputed import to_npy, to_text

HIDDEN = 128  # the demo model's
VALUES = np.random.default_rng(0).standard_normal((40, HIDDEN)).astype(np.float32)
TEXT = to_text(to_npy(VALUES))


@pytest.fixture(scope="module")
def preparer() -> RequestPreparer:
    return RequestPreparer.from_config(
        Config(enable_prompt_embeds=True, max_media_bytes=30_000, max_request_media_bytes=50_000)
    )


def complete(client: Client, **fields: Any) -> httpx.Response:
    return client.send("POST", "/v1/completions", json={"model": MODEL} | fields)


def test_the_engine_gets_the_vectors_in_strips_as_long_as_a_picture(client: Client, engine: FakeEngine) -> None:
    body = complete(client, prompt_embeds=TEXT).json()
    [request] = engine.requests
    assert [item.span for item in request.media] == [TokenSpan(0, 16), TokenSpan(16, 16), TokenSpan(32, 8)]
    assert {item.modality for item in request.media} == {"prompt_embeds"}
    prepared = client.preparer.prepare_embeds({"prompt_embeds": TEXT}, request.sampling_params)[0]
    names = [item.media_hash for item in request.media]
    assert [item.media_hash for item in prepared.engine_request.media] == names
    carried = prepared.pixels_of(names)
    assert np.array_equal(np.concatenate([carried_embeddings(carried[name]) for name in names]), VALUES)
    assert body["usage"]["prompt_tokens"] == 40
    details = {"cached_tokens": 0, "image_tokens": 0, "audio_tokens": 0, "text_tokens": 40}
    assert body["usage"]["prompt_tokens_details"] == details


def test_a_list_is_several_prompts_each_with_its_choices(client: Client, engine: FakeEngine) -> None:
    other = to_text(to_npy(VALUES[:5]))
    body = complete(client, prompt_embeds=[TEXT, other], prompt=None, n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert sorted(len(request.token_ids) for request in engine.requests) == [5, 40]


def test_prompts_with_a_common_start_share_strip_names_within_one_salt(client: Client, engine: FakeEngine) -> None:
    changed = VALUES.copy()
    changed[20, 0] += 1
    complete(client, prompt_embeds=TEXT)
    complete(client, prompt_embeds=to_text(to_npy(changed)))
    complete(client, prompt_embeds=TEXT, cache_salt="another")
    first, second, salted = ([item.media_hash for item in request.media] for request in engine.requests)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]
    assert not set(first) & set(salted)


def of_nan() -> str:
    return to_text(to_npy(np.full((2, HIDDEN), np.nan, np.float32)))


@pytest.mark.parametrize(
    ("fields", "param", "code", "status"),
    [
        ({}, "prompt", "invalid_argument", 400),
        ({"prompt": None}, "prompt", "invalid_argument", 400),
        ({"prompt": "a", "prompt_embeds": TEXT}, "prompt_embeds", "invalid_argument", 400),
        ({"prompt": [2], "prompt_embeds": [TEXT]}, "prompt_embeds", "invalid_argument", 400),
        ({"prompt_embeds": ""}, "prompt_embeds", "invalid_argument", 400),
        ({"prompt_embeds": []}, "prompt_embeds", "invalid_argument", 400),
        ({"prompt_embeds": [TEXT, 1]}, "prompt_embeds[1]", "invalid_argument", 400),
        ({"prompt_embeds": {"a": 1}}, "prompt_embeds", "invalid_argument", 400),
        ({"prompt_embeds": [TEXT] * 129, "n": 2}, "prompt_embeds", "invalid_argument", 400),
        ({"prompt_embeds": "no base64"}, "prompt_embeds", "prompt_embeds_refused", 400),
        ({"prompt_embeds": to_text(b"\x80\x04}\x94.")}, "prompt_embeds", "prompt_embeds_refused", 400),
        ({"prompt_embeds": to_text(to_npy(VALUES[:, :5]))}, "prompt_embeds", "prompt_embeds_refused", 400),
        ({"prompt_embeds": to_text(to_npy(VALUES[:0]))}, "prompt_embeds", "prompt_embeds_refused", 400),
        ({"prompt_embeds": to_text(to_npy(VALUES[:4].astype(int)))}, "prompt_embeds", "prompt_embeds_refused", 400),
        ({"prompt_embeds": [TEXT, of_nan()]}, "prompt_embeds[1]", "prompt_embeds_refused", 400),
        ({"prompt_embeds": to_text(to_npy(VALUES.repeat(2, 0)))}, "prompt_embeds", "media_too_large", 413),
        ({"prompt_embeds": [TEXT] * 3}, "prompt_embeds[2]", "media_too_large", 413),
    ],
)
def test_invalid_embeddings_are_refused_by_field_name(
    client: Client, engine: FakeEngine, fields: dict[str, Any], param: str, code: str, status: int
) -> None:
    response = complete(client, **fields)
    error = response.json()["error"]
    assert (error["param"], error["code"], response.status_code) == (param, code, status)
    assert not engine.requests


def test_prompt_and_prompt_embeds_exclude_each_other(client: Client) -> None:
    message = complete(client, prompt="a", prompt_embeds=TEXT).json()["error"]["message"]
    assert "exactly one of prompt and prompt_embeds must be given" in message
    assert complete(client, prompt="", prompt_embeds=TEXT).status_code == 200


def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(client: Client) -> None:
    client.preparer = RequestPreparer.from_config(Config(enable_prompt_embeds=True, max_model_len=40))
    error = complete(client, prompt_embeds=[TEXT]).json()["error"]
    assert (error["param"], error["code"]) == ("prompt_embeds[0]", "context_length_exceeded")
    assert "has 40 tokens" in error["message"]


def test_without_the_flag_the_refusal_names_it(client: Client) -> None:
    client.preparer = RequestPreparer.from_config(Config(enable_mm_embeds=True))
    error = complete(client, prompt_embeds=TEXT).json()["error"]
    assert (error["param"], error["code"]) == ("prompt_embeds", "unsupported_field")
    assert "--enable-prompt-embeds" in error["message"]
