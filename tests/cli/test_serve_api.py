"""A real `keepsight serve` with API keys, queried with the official client and with plain HTTP."""

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.drawn import ask, by_url, draw
from tests.official_client import answer, complete
from tests.real_server import END_SECONDS, START_SECONDS, serving

OPTIONS = (
    *("--api-key", "one", "two", "--admin-api-key", "admin", "--cache-isolation", "api-key"),
    *("--served-model-name", "mine", "keepsight-demo", "--max-body-mb", "1"),
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, *OPTIONS) as (process, port):
        yield f"http://127.0.0.1:{port}"
        # Guarantees a log line to check, whichever tests were selected.
        body = {"model": "mine", "prompt": "Hello", "max_tokens": 1}
        headers = {"Authorization": "Bearer one"}
        completions = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(completions, json=body, headers=headers, timeout=START_SECONDS).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0
    text = log.read_text()
    assert "Traceback" not in text
    assert "POST /v1/completions 200 in" in text
    assert not any(key in text for key in ("'one'", "'two'", "'admin'"))


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client:
        yield client


def num_cached(client: openai.OpenAI, key: str) -> int:
    messages = ask(by_url(draw(9).picture), "What is in this picture?")
    usage = complete(client.with_options(api_key=key), messages, max_tokens=1).usage
    assert usage.prompt_tokens_details.image_tokens == 16
    return int(usage.prompt_tokens_details.cached_tokens)


def reset(url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{url}/reset_prefix_cache", headers=headers, timeout=START_SECONDS).status_code


def test_callers_with_different_keys_share_no_cache_entries(client: openai.OpenAI, url: str) -> None:
    assert num_cached(client, "one") == 0
    assert num_cached(client, "one") > 0
    assert num_cached(client, "two") == 0
    assert num_cached(client, "two") > 0
    assert reset(url, "one") == 401
    assert num_cached(client, "one") > 0
    assert reset(url, "admin") == 200
    assert num_cached(client, "one") == 0


def test_a_streamed_completion_equals_the_whole_one(client: openai.OpenAI) -> None:
    create: Any = client.completions.create
    options = {"model": "mine", "prompt": "Hello", "temperature": 0, "max_tokens": 8, "logprobs": 2}
    whole = create(**options)
    chunks = list(create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == len(whole.choices[0].logprobs.tokens)
    tokens = httpx.post(
        f"{client.base_url}".replace("/v1/", "/tokenize"),
        json={"prompt": "Hello"},
        headers={"Authorization": "Bearer one"},
        timeout=START_SECONDS,
    ).json()["tokens"]
    both = create(**options | {"prompt": [tokens, tokens]})
    assert [choice.text for choice in both.choices] == [whole.choices[0].text] * 2
    assert whole._request_id


def test_the_asynchronous_client_streams_a_completion(url: str) -> None:
    async def stream() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="two") as client:
            create: Any = client.completions.create
            chunks = await create(model="mine", prompt="Hello", max_tokens=4, temperature=0, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

    assert asyncio.run(stream())


def test_echo_returns_the_logprobs_of_a_prompt(client: openai.OpenAI) -> None:
    tokens = [2, *range(300, 330)]
    for _ in range(2):  # the second time its keys and values are cached
        whole: Any = client.completions.create(model="mine", prompt=tokens, max_tokens=1, logprobs=1, echo=True)
        logprobs = whole.choices[0].logprobs
        assert len(logprobs.token_logprobs) == len(tokens) + 1
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        for own, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True):
            assert own <= max(top.values()) <= 0
        assert whole.usage.prompt_tokens_details.cached_tokens == 0


def test_errors_are_the_official_client_s_exceptions(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.AuthenticationError) as stranger:
        answer(client.with_options(api_key="three"), ask("Hello"))
    assert stranger.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as mistaken:
        client.completions.create(model="mine", prompt="a", best_of=2)
    assert (mistaken.value.param, mistaken.value.code) == ("best_of", "unsupported_field")
    with pytest.raises(openai.APIStatusError) as large:
        answer(client, ask("a" * 2_000_000))
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")
    assert client.models.retrieve("mine").id == "mine"
    assert [model.id for model in client.models.list()] == ["mine", "keepsight-demo"]
    assert httpx.get(f"{url}/ready", timeout=START_SECONDS).status_code == 200
