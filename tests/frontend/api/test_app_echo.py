"""What a response contains of its prompt: `echo`, and the log-probabilities of the prompt's tokens."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from keepsight.frontend.api import prepare_answer
from keepsight.frontend.api.answer_completion import CompletionAnswer
from keepsight.frontend.api.app import create_app
from tests.drawn import ask
from tests.frontend.api.app_client import MODEL, Client, FakeEngine, complete, error_of, events_of

ANSWER = "Red. Blue."


@pytest.fixture(autouse=True)
def answers_end_by_length(engine: FakeEngine) -> None:
    engine.end = "length"


def test_each_choice_begins_with_its_prompt(client: Client) -> None:
    body = complete(client, ["Hello", "Good day"], n=2, echo=True).json()
    assert [choice["text"] for choice in body["choices"]] == [f"Hello{ANSWER}"] * 2 + [f"Good day{ANSWER}"] * 2
    assert {choice["logprobs"] for choice in body["choices"]} == {None}


def test_a_stream_s_choices_begin_with_their_prompts(client: Client) -> None:
    events = events_of(complete(client, ["Hello", "Good day"], n=2, echo=True, stream=True))
    choices = [choice for event in events for choice in event["choices"]]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(4)]
    assert texts == [f"Hello{ANSWER}"] * 2 + [f"Good day{ANSWER}"] * 2


def test_token_ids_are_echoed_as_their_text(client: Client) -> None:
    token_ids = client.preparer.tokenizer.encode("Hello", add_bos=True)
    [choice] = complete(client, list(token_ids), echo=True).json()["choices"]
    assert choice["text"] == f"<bos>Hello{ANSWER}"


@pytest.mark.parametrize("n", [1, 3])
def test_logprobs_cover_the_prompt_s_second_token_to_the_answer_s_last(client: Client, n: int) -> None:
    tokenizer = client.preparer.tokenizer
    prompt = "Hello é🎉 there"
    token_ids = tokenizer.encode(prompt, add_bos=True)
    for choice in complete(client, prompt, echo=True, logprobs=2, n=n).json()["choices"]:
        assert choice["text"] == prompt + ANSWER
        logprobs = choice["logprobs"]
        num_answered = len(tokenizer.encode(ANSWER))
        expected = [None, *(-float(place) for place in range(1, len(token_ids))), *[-0.5] * num_answered]
        assert logprobs["token_logprobs"] == expected
        assert logprobs["top_logprobs"][0] is None
        assert {len(top) for top in logprobs["top_logprobs"][1:]} == {3}
        # The caller did not write `<bos>`, so it has no characters in the text.
        assert logprobs["tokens"][0] == "<bos>"
        assert logprobs["text_offset"][:2] == [0, 0]
        for token, offset in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
            assert token == "\ufffd" or choice["text"][offset:].startswith(token)
        assert "prompt_logprobs" not in choice


def test_a_bos_written_by_the_caller_is_part_of_the_text(client: Client) -> None:
    [choice] = complete(client, "<bos>Hello", echo=True, logprobs=0).json()["choices"]
    assert choice["text"] == f"<bos>Hello{ANSWER}"
    assert choice["logprobs"]["text_offset"][:2] == [0, len("<bos>")]


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_prompt_is_returned_if_no_tokens_are_requested(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {"logprobs": 1}
    response = complete(client, "Hello", echo=True, max_tokens=0, stream=stream, **more)
    events = events_of(response) if stream else [response.json()]
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Hello"
    assert choices[-1]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 0
    [request] = engine.requests
    assert request.sampling_params.max_tokens == 1
    if not stream:
        assert len(choices[0]["logprobs"]["tokens"]) == len(request.token_ids)


def test_prompt_logprobs_have_the_shape_of_vllm_s(client: Client) -> None:
    token_ids = client.preparer.tokenizer.encode("Hello there", add_bos=True)
    for choice in complete(client, "Hello there", prompt_logprobs=1, n=2).json()["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [next(iter(each)) for each in others] == [str(token_id) for token_id in token_ids[1:]]
        own = others[0][str(token_ids[1])]
        decoded = client.preparer.tokenizer.token_bytes(token_ids[1]).decode()
        assert own == {"logprob": -1.0, "rank": 9, "decoded_token": decoded}
        assert choice["text"] == ANSWER
        assert choice["logprobs"] is None


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(0, 2), (2, 0), (1, 1)])
def test_logprobs_and_prompt_logprobs_set_their_own_numbers(
    client: Client, logprobs: int, prompt_logprobs: int
) -> None:
    fields = {"echo": True, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    [choice] = complete(client, "Hello there", **fields).json()["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {1 + logprobs}
    assert {len(ones) for ones in choice["prompt_logprobs"][1:]} == {1 + prompt_logprobs}


def test_a_chat_returns_its_prompt_logprobs_once(client: Client, engine: FakeEngine) -> None:
    body = client.send("POST", "/v1/chat/completions", json={"messages": ask("Hello"), "prompt_logprobs": 0, "n": 2})
    [request] = engine.requests
    first, *others = body.json()["prompt_logprobs"]
    assert first is None
    assert [list(each) for each in others] == [[str(token_id)] for token_id in request.token_ids[1:]]
    assert "prompt_logprobs" not in client.chat().json()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"prompt_logprobs": 0, "stream": True}, "stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 2}, "min_tokens"),
    ],
)
def test_impossible_requests_are_refused_by_field_name(client: Client, fields: dict[str, Any], field: str) -> None:
    assert error_of(complete(client, "Hello", **fields)) == (400, field, "invalid_argument")


def test_an_embedded_prompt_has_no_echo_or_logprobs(client: Client) -> None:
    for fields in ({"echo": True}, {"prompt_logprobs": 0}):
        [name] = fields
        response = client.send("POST", "/v1/completions", json={"prompt_embeds": "AAAA", **fields})
        assert error_of(response) == (400, name, "invalid_argument")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("echo", {"echo": True, "logprobs": 1}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("prompt_logprobs", {"echo": True, "logprobs": 0, "prompt_logprobs": 0}),
    ],
)
def test_the_number_of_prompt_logprobs_in_a_response_is_limited(
    client: Client, monkeypatch: pytest.MonkeyPatch, field: str, fields: dict[str, Any]
) -> None:
    num_tokens = len(client.preparer.tokenizer.encode("Hello", add_bos=True))
    monkeypatch.setattr(prepare_answer, "MAX_PROMPT_LOGPROBS_IN_ANSWER", 2 * 3 * num_tokens)
    assert complete(client, ["Hello"] * 3, **fields).status_code == 200
    # Each choice repeats the log-probabilities of its prompt.
    for prompts, n in ((4, 1), (2, 2), (1, 4)):
        response = complete(client, ["Hello"] * prompts, n=n, **fields)
        assert error_of(response) == (400, field, "invalid_argument")
        assert f"asks for {2 * 4 * num_tokens} log-probabilities" in response.text


def test_a_chat_s_prompt_logprobs_count_once_for_all_choices(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"messages": ask("Hello"), "prompt_logprobs": 0}
    num_tokens = client.send("POST", "/v1/chat/completions", json=asked).json()["usage"]["prompt_tokens"]
    monkeypatch.setattr(prepare_answer, "MAX_PROMPT_LOGPROBS_IN_ANSWER", num_tokens)
    assert client.send("POST", "/v1/chat/completions", json={**asked, "n": 4}).status_code == 200


def test_echoed_prompts_are_rendered_one_at_a_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    render, under_way, at_once = CompletionAnswer._completion, list[None](), list[int]()

    def tell_slowly(*args: Any) -> Any:
        under_way.append(None)
        at_once.append(len(under_way))
        time.sleep(0.02)
        under_way.pop()
        return render(*args)

    monkeypatch.setattr(CompletionAnswer, "_completion", tell_slowly)

    async def run() -> None:
        transport = httpx.ASGITransport(create_app(client.preparer, client.engine, MODEL))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            body = {"prompt": "Hello", "echo": True, "logprobs": 1}
            responses = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(8)))
            assert {response.status_code for response in responses} == {200}

    asyncio.run(run())
    assert at_once == [1] * 8
