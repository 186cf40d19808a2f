"""Token ids beside an answer's text: `return_token_ids`, and `return_tokens_as_token_ids` for log-probabilities."""

from typing import Any

import pytest

from keepsight.frontend.api import prepare_answer
from tests.drawn import ask
from tests.frontend.api.app_client import Client, FakeEngine, complete, error_of, events_of


def chat(client: Client, **fields: Any) -> Any:
    return client.send("POST", "/v1/chat/completions", json={"messages": ask("Hello é🎉"), **fields})


def test_a_chat_returns_the_ids_of_its_prompt_and_choices(client: Client) -> None:
    body = chat(client, n=2, return_token_ids=True).json()
    tokenized = client.send("POST", "/tokenize", json={"messages": ask("Hello é🎉")}).json()
    assert body["prompt_token_ids"] == tokenized["tokens"]
    tokenizer = client.preparer.tokenizer
    for choice in body["choices"]:
        assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["message"]["content"]
    assert sum(len(choice["token_ids"]) for choice in body["choices"]) == body["usage"]["completion_tokens"]


def test_a_streamed_chat_returns_its_prompt_s_ids_first_and_then_each_token_s(client: Client) -> None:
    whole = chat(client, n=2, return_token_ids=True).json()
    first, *others = events_of(chat(client, n=2, stream=True, return_token_ids=True))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not [event for event in others if "prompt_token_ids" in event]
    for choice in whole["choices"]:
        own = [each for event in others for each in event["choices"] if each["index"] == choice["index"]]
        assert [one for each in own for one in each.get("token_ids", [])] == choice["token_ids"]


@pytest.mark.parametrize("echo", [False, True])
def test_each_choice_of_a_completion_returns_its_prompt_s_and_its_own_ids(client: Client, echo: bool) -> None:
    prompts = ["Hello", "Good day"]
    body = complete(client, prompts, n=2, echo=echo, return_token_ids=True).json()
    tokenizer = client.preparer.tokenizer
    for choice in body["choices"]:
        prompt = prompts[choice["index"] // 2]
        assert choice["prompt_token_ids"] == list(tokenizer.encode(prompt, add_bos=True))
        answer = tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        assert choice["text"] == (prompt if echo else "") + answer

    streamed = events_of(complete(client, prompts, n=2, echo=echo, stream=True, return_token_ids=True))
    for choice in body["choices"]:
        first, *others = [each for event in streamed for each in event["choices"] if each["index"] == choice["index"]]
        assert first["prompt_token_ids"] == choice["prompt_token_ids"]
        assert not [each for each in others if "prompt_token_ids" in each]
        assert [one for each in others for one in each["token_ids"]] == choice["token_ids"]
        assert first["text"] + "".join(each["text"] for each in others) == choice["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone_has_no_ids_of_an_answer(client: Client, stream: bool) -> None:
    response = complete(client, "Hello", echo=True, max_tokens=0, return_token_ids=True, stream=stream)
    events = events_of(response) if stream else [response.json()]
    assert not any(choice.get("token_ids") for event in events for choice in event["choices"])


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
def test_ids_are_returned_only_on_request(client: Client, asked: dict[str, Any]) -> None:
    for response in (chat(client, **asked), chat(client, stream=True, **asked), complete(client, "Hello", **asked)):
        assert "token_ids" not in response.text


def test_the_number_of_returned_prompt_ids_is_limited(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens = len(client.preparer.tokenizer.encode("Hello", add_bos=True))
    monkeypatch.setattr(prepare_answer, "MAX_TOKEN_IDS_IN_ANSWER", 4 * num_tokens)
    assert complete(client, "Hello", n=4, return_token_ids=True).status_code == 200
    assert complete(client, "Hello", n=5).status_code == 200
    refused = complete(client, "Hello", n=5, return_token_ids=True)
    assert error_of(refused)[:2] == (400, "return_token_ids")


def test_a_text_with_far_too_many_ids_is_not_encoded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_answer, "MAX_TOKEN_IDS_IN_ANSWER", 50)
    assert client.send("POST", "/tokenize", json={"prompt": "Hello there" * 9}).status_code == 200
    refused = client.send("POST", "/tokenize", json={"prompt": "Hello there" * 90})
    assert error_of(refused) == (400, "prompt", "invalid_argument")


def test_log_probabilities_may_name_tokens_by_their_ids(client: Client, engine: FakeEngine) -> None:
    engine.end = "length"
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = chat(client, logprobs=True, top_logprobs=2, **asked).json()["choices"]
    logprobs = choice["logprobs"]["content"]
    assert [each["token"] for each in logprobs] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert [bytes(each["bytes"]) for each in logprobs] == [
        client.preparer.tokenizer.token_bytes(token_id) for token_id in choice["token_ids"]
    ]
    assert all(top["token"].startswith("token_id:") for each in logprobs for top in each["top_logprobs"])

    [choice] = complete(client, "Hello", logprobs=2, **asked).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
