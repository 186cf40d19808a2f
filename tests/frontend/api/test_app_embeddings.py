"""`POST /v1/embeddings`: the vector that the model computes for each input, in OpenAI's shapes."""

import asyncio
import base64
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import PreTrainedTokenizerFast

from keepsight.config import Config
from keepsight.demo import checkpoint_path
from keepsight.frontend.api import answer_embeddings
from keepsight.frontend.api.app import create_app
from keepsight.frontend.prepare_request import RequestPreparer
from tests.drawn import ask, by_url, draw
from tests.frontend.adding_tokenizer import make_tokenizer_add
from tests.frontend.api.app_client import HELLO, MODEL, Client, FakeEngine, error_of


def embed(client: Client, **fields: Any) -> Any:
    response = client.send("POST", "/v1/embeddings", json={"model": MODEL} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def unit(numbers: Any) -> Any:
    return numbers / np.linalg.norm(numbers)


def vector_of(engine: FakeEngine, index: int = -1) -> Any:
    return np.frombuffer(engine.vector_of(engine.requests[index]), "<f4")


def test_a_text_becomes_one_vector_of_length_one(client: Client, engine: FakeEngine) -> None:
    body = embed(client, input="Hello")
    [embedding] = body["data"]
    assert (body["object"], body["model"], embedding["object"], embedding["index"]) == ("list", MODEL, "embedding", 0)
    np.testing.assert_allclose(embedding["embedding"], unit(vector_of(engine)), rtol=1e-6)
    num_tokens = len(engine.requests[0].token_ids)
    assert engine.requests[0].token_ids == client.preparer.tokenizer.encode("Hello", add_bos=True)
    assert body["usage"] == {
        "prompt_tokens": num_tokens,
        "completion_tokens": 0,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {
            "cached_tokens": 0, "image_tokens": 0, "audio_tokens": 0, "text_tokens": num_tokens,
        },
    }  # fmt: skip


def test_tokens_after_a_text_are_put_after_what_is_read_but_not_after_what_is_continued(tmp_path: Path) -> None:
    shutil.copytree(checkpoint_path(), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    make_tokenizer_add(tmp_path, "<eos> <bos> $A <end_of_turn>")
    by_transformers: Any = PreTrainedTokenizerFast
    judge = by_transformers(tokenizer_file=str(tmp_path / "tokenizer.json")).encode("Hello")
    preparer = RequestPreparer.from_config(Config(model=tmp_path))
    engine = FakeEngine(preparer)
    client = Client(preparer, engine)
    embed(client, input="Hello")
    client.send("POST", "/v1/completions", json={"prompt": "Hello", "max_tokens": 1})
    assert [list(each.token_ids) for each in engine.requests] == [judge, judge[:-1]]
    tokenized = [
        client.send("POST", "/tokenize", json={"prompt": "Hello", "add_special_tokens": adds}).json()["tokens"]
        for adds in (True, False)
    ]
    assert tokenized == [judge, judge[2:-1]]
    preparer.close()


def test_the_engine_gets_a_request_for_one_token_and_a_vector(client: Client, engine: FakeEngine) -> None:
    embed(client, input="Hello", cache_salt="mine", priority=3)
    [asked] = engine.requests
    assert asked.wants_vector
    assert (asked.sampling_params.max_tokens, asked.cache_salt, asked.priority) == (1, "mine", 3)


def test_several_inputs_are_answered_in_order(client: Client, engine: FakeEngine) -> None:
    ids = list(client.preparer.tokenizer.encode("Good day"))
    body = embed(client, input=["Hello", ids, "Red"])
    assert [each["index"] for each in body["data"]] == [0, 1, 2]
    asked = {each.request_id: each for each in engine.requests}
    for embedding, request_id in zip(body["data"], sorted(asked, key=int), strict=True):
        expected = np.frombuffer(engine.vector_of(asked[request_id]), "<f4")
        np.testing.assert_allclose(embedding["embedding"], unit(expected), rtol=1e-6)
    [one] = embed(client, input=ids)["data"]
    assert one["embedding"] == body["data"][1]["embedding"]


def test_the_inputs_in_the_engine_at_once_are_limited(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_embeddings, "MAX_AT_ONCE", 2)
    running, most = 0, 0

    def begin() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)

    def end() -> None:
        nonlocal running
        running -= 1

    engine.on_begun, engine.on_abandoned = begin, end
    assert len(embed(client, input=["Hello"] * 7)["data"]) == 7
    assert (running, most) == (0, 2)


def test_numbers_come_as_base64_where_that_is_asked(client: Client) -> None:
    [numbers], [encoded] = (embed(client, input="Hello", encoding_format=each)["data"] for each in ("float", "base64"))
    vector = np.frombuffer(base64.b64decode(encoded["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, np.array(numbers["embedding"], np.float32))


def test_a_vector_may_be_cut_and_may_keep_its_length(client: Client, engine: FakeEngine) -> None:
    [cut] = embed(client, input="Hello", dimensions=3)["data"]
    np.testing.assert_allclose(cut["embedding"], unit(vector_of(engine)[:3]), rtol=1e-6)
    [raw] = embed(client, input="Hello", use_activation=False)["data"]
    np.testing.assert_array_equal(raw["embedding"], vector_of(engine))


def test_messages_with_a_picture_can_be_embedded(client: Client, engine: FakeEngine) -> None:
    messages = ask("Represent it.", by_url(draw(7).picture))
    body = embed(client, messages=messages)
    assert body["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    by_default = engine.requests[-1].token_ids
    embed(client, messages=messages, add_generation_prompt=True)
    begun = engine.requests[-1].token_ids
    assert begun[: len(by_default)] == by_default
    assert len(begun) > len(by_default)
    # As vLLM's own client sends it.
    for value in (True, False):
        embed(client, messages=messages, add_generation_prompt=False, add_special_tokens=value)
        assert engine.requests[-1].token_ids == by_default


def test_accounts_have_one_entry_per_input(client: Client) -> None:
    body = embed(client, input=["Hello", "Red"], keepsight={"account": True})
    assert len(body["keepsight"]["accounts"]) == 2


def test_cached_tokens_of_all_inputs_are_counted(client: Client, engine: FakeEngine) -> None:
    engine.num_cached_tokens = {0: 2}
    assert embed(client, input=["Hello", "Red"])["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_a_failing_input_ends_the_others(client: Client, engine: FakeEngine) -> None:
    engine.fails_after = 0
    response = client.send("POST", "/v1/embeddings", json={"input": ["Hello"] * 3})
    assert response.status_code == 500


def test_a_client_that_leaves_ends_its_computation(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_embeddings, "MAX_AT_ONCE", 2)
    engine.is_ready = asyncio.Event()  # never set
    body = json.dumps({"input": ["Hello"] * 5}).encode()

    async def call_and_leave() -> None:
        all_asked = asyncio.Event()

        def begin() -> None:
            if len(engine.requests) == 2:
                all_asked.set()

        engine.on_begun = begin
        messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await all_asked.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": [], "query_string": b""}
        await asyncio.wait_for(create_app(client.preparer, engine, MODEL)(scope, receive, send), timeout=10)
        # Checked here, as closing the loop would cancel whatever still runs.
        assert (len(engine.requests), engine.num_abandoned) == (2, 2)

    asyncio.run(call_and_leave())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "input"),
        ({"input": "Hello", "messages": HELLO}, "input"),
        ({"input": []}, "input"),
        ({"input": ["Hello"] * 2049}, "input"),
        ({"input": ["Hello", 3]}, "input[1]"),
        ({"input": [["Hello"]]}, "input[0]"),
        ({"input": ["Hello", [10**6]]}, "input[1]"),
        ({"input": "Hello", "dimensions": 0}, "dimensions"),
        ({"input": "Hello", "dimensions": 10**6}, "dimensions"),
        ({"input": "Hello", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "Hello", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "Hello", "add_special_tokens": False}, "add_special_tokens"),
        ({"input": "Hello", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"input": "Hello", "mm_processor_kwargs": {}}, "mm_processor_kwargs"),
        ({"input": "Hello", "tools": [{"type": "function", "function": {"name": "look"}}]}, "tools"),
        ({"input": "Hello", "prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ({"input": "Hello", "model": "another"}, "model"),
        ({"inptu": "Hello"}, "inptu"),
    ],
)
def test_invalid_fields_are_refused_by_name(client: Client, fields: dict[str, Any], field: str) -> None:
    status, param, _ = error_of(client.send("POST", "/v1/embeddings", json=fields))
    assert status == (404 if field == "model" else 400)
    assert param == field


def test_an_input_that_is_too_long_is_refused_by_its_index(client: Client) -> None:
    long = "Hello " * client.preparer.max_model_len
    status, param, code = error_of(client.send("POST", "/v1/embeddings", json={"input": ["Hello", long]}))
    assert (status, param, code) == (400, "input[1]", "context_length_exceeded")


def test_the_official_client_reads_vectors_in_base64(client: Client, engine: FakeEngine) -> None:
    """The client asks for base64 and decodes it, unseen by its caller."""
    http_client: Any = httpx.Client(transport=httpx.MockTransport(partial(pass_on, client)))
    official = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http_client)
    response = official.embeddings.create(model=MODEL, input=["Hello", "Red"])
    assert [each.index for each in response.data] == [0, 1]
    np.testing.assert_allclose(response.data[1].embedding, unit(vector_of(engine)), rtol=1e-6)
    assert response.usage.total_tokens == sum(len(each.token_ids) for each in engine.requests)


def pass_on(client: Client, request: httpx.Request) -> httpx.Response:
    answered = client.send(request.method, request.url.path, content=request.content)
    return httpx.Response(answered.status_code, content=answered.content, headers={"content-type": "application/json"})
