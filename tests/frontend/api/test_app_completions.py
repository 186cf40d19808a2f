"""Completions, tokens and limits, with the app in process."""

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from keepsight.api_settings import ApiSettings
from keepsight.errors import RequestFailedError
from keepsight.frontend.api import app as app_module
from keepsight.frontend.api import prepare_answer
from keepsight.frontend.api.app import create_app
from keepsight.frontend.api.completion_request import CompletionRequest, parse_completion_request
from keepsight.frontend.api.tokenize_request import TokenizeRequest
from keepsight.frontend.engine_client import EngineClient
from keepsight.frontend.http.decode_body import Buffer
from keepsight.frontend.media_pool import MediaPool
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.expand_prompt import PromptExpander
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.observe.account_ring import AccountRing, read_rings
from keepsight.observe.catalogue import BOUNDS
from keepsight.observe.request_observer import ANSWER_TOKENS, ENDS, FIRST_TOKEN, PROMPT_TOKENS, WHOLE, RequestObserver
from keepsight.observe.server_view import ServerView
from keepsight.requests import EngineRequest, ToEngine, TokenLogprob, TokenOutput
from tests.byte_level_tokenizer import byte_level_checkpoint
from tests.drawn import ask, by_url, draw
from tests.frontend.api.app_client import HELLO, MODEL, Client, FakeEngine, complete, error_of, events_of
from tests.frontend.api.test_app import field_names, json_values, small, texts
from tests.llama_like_tokenizer import llama_like_checkpoint

# Completions --------------------------------------------------------------------------------------------------


def test_a_completion_has_the_shape_of_openai_s(client: Client, engine: FakeEngine) -> None:
    body = complete(client, "Hello").json()
    [request] = engine.requests
    num_prompt, num_answer = len(request.token_ids), len(client.preparer.tokenizer.encode(engine.text)) + 1
    assert request.token_ids == client.preparer.tokenizer.encode("Hello", add_bos=True)
    assert request.sampling_params.max_tokens == 16
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    choice = {"index": 0, "text": "Red. Blue.", "finish_reason": "stop", "logprobs": None, "stop_reason": None}
    details = {"cached_tokens": 0, "image_tokens": 0, "audio_tokens": 0, "text_tokens": num_prompt}
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
            "prompt_tokens_details": details,
        },
    }


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_has_its_choices_in_order(client: Client, engine: FakeEngine, stream: bool) -> None:
    engine.num_cached_tokens = {0: 1, 1: 2}
    response = complete(client, ["Hello", "Good day"], n=2, stream=stream, **usage_if(stream))
    assert response.status_code == 200
    if stream:
        *chunks, last = events_of(response)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        usage = last["usage"]
    else:
        choices, usage = response.json()["choices"], response.json()["usage"]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(4)]
    assert texts == ["Red. Blue."] * 4
    assert usage["prompt_tokens"] == sum(len(request.token_ids) for request in engine.requests)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert len(engine.requests) == 2


def usage_if(stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if stream else {}


def test_token_ids_are_used_as_a_prompt_unchanged(client: Client, engine: FakeEngine) -> None:
    assert complete(client, [2, 5, 6]).status_code == 200
    assert complete(client, [[2, 5], [2, 9, 10]]).status_code == 200
    assert [request.token_ids for request in engine.requests] == [(2, 5, 6), (2, 5), (2, 9, 10)]


@pytest.mark.parametrize("field", ["prompt", "prompt_embeds"])
def test_too_many_prompts_are_refused_before_any_is_prepared(client: Client, field: str) -> None:
    response = client.send("POST", "/v1/completions", json={"model": MODEL, field: [None] * 257})
    assert error_of(response) == (400, field, "invalid_argument")
    assert "not 257" in response.text


def test_logprobs_have_text_offsets_also_in_a_stream(client: Client, engine: FakeEngine) -> None:
    engine.end = "length"
    [choice] = complete(client, "Hello", logprobs=2).json()["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "Red. Blue."
    ends = [offset + len(token) for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
    assert logprobs["text_offset"] == [0, *ends[:-1]]
    assert {len(top) for top in logprobs["top_logprobs"]} == {3}
    chunks = events_of(complete(client, "Hello", logprobs=2, stream=True))
    for name in logprobs:
        assert [each for chunk in chunks for each in chunk["choices"][0]["logprobs"][name]] == logprobs[name]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_the_spaces_of_tokenizers_that_put_one_before_every_text(
    client: Client, engine: FakeEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_checkpoint(llama_like_checkpoint())
    monkeypatch.setattr(engine.preparer, "tokenizer", tokenizer)
    engine.token_ids, engine.end = tokenizer.encode(" quick brown fox jumps"), "length"
    choices = choices_of(complete(client, "A", logprobs=0, stream=stream), stream)
    text = "".join(choice["text"] for choice in choices)
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert text == "  quick brown fox jumps"
    ends = [*offsets[1:], len(text)]
    shown = [text[begin:end] for begin, end in zip(offsets, ends, strict=True)]
    assert shown == [tokenizer.token_bytes(each).decode() for each in engine.token_ids]


@pytest.mark.parametrize(
    ("prompt", "beginning"),
    [
        # The tokenizer's own space is not in the text, nor is a first token that the prompt does not spell.
        ("A quick", ["", "", "A qu"]),
        (" A quick", ["", " ", "", "A qu"]),
        ("<s>A quick", ["<s>", "", "A qu"]),
        ([297, 355, 301, 281], ["", "A qu"]),
        ([1, 297, 355, 301, 281], ["<s>", " ", "A qu"]),
    ],
)
def test_offsets_in_an_echo_leave_out_the_space_that_tokenizers_put_before_every_text(
    client: Client, engine: FakeEngine, prompt: str | list[int], beginning: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_checkpoint(llama_like_checkpoint())
    monkeypatch.setattr(client.preparer, "tokenizer", tokenizer)
    monkeypatch.setattr(client.preparer, "expander", PromptExpander(tokenizer, None))
    engine.token_ids, engine.end = tokenizer.encode(" fox"), "length"
    [choice] = complete(client, prompt, logprobs=0, echo=True).json()["choices"]
    text, offsets = choice["text"], choice["logprobs"]["text_offset"]
    shown = [text[begin:end] for begin, end in itertools.pairwise([*offsets, len(text)])]
    assert shown == [*beginning, "ic", "k", " ", " ", "fo", "x"]


def test_where_an_echo_s_tokens_are_not_its_text_their_own_length_counts(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    monkeypatch.setattr(client.preparer, "tokenizer", tokenizer)
    monkeypatch.setattr(client.preparer, "expander", PromptExpander(tokenizer, None))
    engine.token_ids, engine.end = tokenizer.encode("z"), "length"
    prompt = "e\u0301x  y  z  w"  # which the tokenizer composes to a character less
    [choice] = complete(client, prompt, logprobs=0, echo=True).json()["choices"]
    assert choice["text"] == prompt + "z"
    assert choice["logprobs"]["text_offset"][-1] == len(prompt) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_even_if_a_token_is_part_of_one(
    client: Client, engine: FakeEngine, stream: bool
) -> None:
    engine.text, engine.end = "a🎉<end_of_turn>\xe9b", "length"
    response = complete(client, "Hello", logprobs=0, stream=stream)
    choices = choices_of(response, stream)
    assert "".join(choice["text"] for choice in choices) == "a🎉éb"
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    #                  a  🎉, four bytes  <end_of_turn>  é, two bytes  b
    assert offsets == [0, *[1, 1, 1, 1], 2, *[2, 2], 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "text", "offsets"),
    [
        ("80 a a 80 80 80 a a", "�aa���aa", [*range(8)]),
        ("E2 96 a", "�a", [0, 0, 0]),
        ("C3 A9 96 a C3 A9", "é�aé", [0, 0, 1, 2, 3, 3]),
        ("C3 <end_of_turn> A9 a", "éa", [0, 0, 0, 1]),
        ("C3 <end_of_turn> a", "�a", [0, 0, 0]),
        ("a E2 96", "a�", [0, 1, 1]),
    ],
)
def test_each_part_that_is_no_character_is_shown_as_one_and_the_characters_beside_it_are_kept(
    client: Client, engine: FakeEngine, answer: str, text: str, offsets: list[int], stream: bool
) -> None:
    engine.token_ids, engine.end = find_ids(client.preparer.tokenizer, answer), "length"
    response = complete(client, "Hello", logprobs=0, stream=stream, return_token_ids=True)
    choices = choices_of(response, stream)
    assert "".join(choice["text"] for choice in choices) == text
    assert [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["text_offset"]] == offsets
    assert [each for choice in choices for each in choice.get("token_ids", ())] == engine.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_with_a_byte_level_tokenizer_a_part_that_is_no_character_is_shown_as_one(
    client: Client, engine: FakeEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_bytes = take_byte_level_tokenizer(client, monkeypatch)
    sent = [b"a", b"\xc3", b"\xa9", b"\xe2", b"b", b"\xff", b"c"]
    engine.token_ids, engine.end = [by_bytes[each] for each in sent], "length"
    response = complete(client, "Hello", logprobs=0, stream=stream, return_token_ids=True)
    choices = choices_of(response, stream)
    assert "".join(choice["text"] for choice in choices) == "aé�b�c"
    logprobs = [choice["logprobs"]["text_offset"] for choice in choices if choice["logprobs"]]
    #               a  é, two bytes  �b       �  c
    assert [*itertools.chain(*logprobs)] == [0, *[1, 1], *[2, 2], 4, 5]
    assert [each for choice in choices for each in choice.get("token_ids", ())] == engine.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_may_end_one_character_and_begin_another(
    client: Client, engine: FakeEngine, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_bytes = take_byte_level_tokenizer(client, monkeypatch)
    sent = [b"a", b" \xf0\x9f\x98", b"\x80", b" \xe6\x9d", b"\xb1"]
    engine.token_ids, engine.end = [by_bytes[each] for each in sent], "length"
    response = complete(client, "Hello", logprobs=0, stream=stream)
    choices = choices_of(response, stream)
    assert "".join(choice["text"] for choice in choices) == "a 😀 東"


def choices_of(response: httpx.Response, stream: bool) -> list[dict[str, Any]]:
    """Return the first choice of each chunk, or of the whole response."""
    return [each["choices"][0] for each in (events_of(response) if stream else [response.json()])]


def take_byte_level_tokenizer(client: Client, monkeypatch: pytest.MonkeyPatch) -> dict[bytes, int]:
    """Give the preparer a byte-level tokenizer; return its token ids by their bytes."""
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    monkeypatch.setattr(client.preparer, "tokenizer", tokenizer)
    return {tokenizer.token_bytes(each): each for each in range(tokenizer.num_tokens)}


def find_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of tokens separated by spaces; two hex digits stand for a byte token."""
    found = [tokenizer.token_id(f"<0x{each}>" if len(each) == 2 else each) for each in text.split()]
    return [each for each in found if each is not None]


def test_bytes_of_a_prompt_and_its_answer_are_not_joined_to_a_character(client: Client, engine: FakeEngine) -> None:
    tokenizer = client.preparer.tokenizer
    engine.token_ids, engine.end = find_ids(tokenizer, "A9 a"), "length"
    [choice] = complete(client, find_ids(tokenizer, "<bos> a C3"), logprobs=0, echo=True).json()["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<bos>a��a", [0, 5, 6, 7, 8])


def test_a_part_of_a_character_keeps_its_own_logprob_if_others_look_alike(client: Client, engine: FakeEngine) -> None:
    engine.text, engine.end = "🎉", "length"
    parts = client.preparer.tokenizer.encode(engine.text)
    others = tuple(TokenLogprob(each, -9.0, 2) for each in parts)

    class Alike(FakeEngine):
        def _tokens(self, request: EngineRequest, choice: int) -> Iterator[TokenOutput]:
            for token in super()._tokens(request, choice):
                yield replace(token, logprobs=(TokenLogprob(token.token_id, -0.5, 1), *others))

    engine.__class__ = Alike
    [choice] = complete(client, "Hello", logprobs=4).json()["choices"]
    assert len(parts) == 4
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}] * 4


def test_usage_can_come_with_every_chunk(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(complete(client, "Hello", stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, counts[-2])


@pytest.mark.parametrize("asked", [{"prompt": ["Hello", "Hello there"]}, {"messages": ask("Hello")}])
def test_usage_in_a_stream_counts_the_tokens_sent_so_far(
    client: Client, engine: FakeEngine, asked: dict[str, Any]
) -> None:
    """The opening chunk has no tokens yet, and of two prompts one may be ahead of what was sent."""
    engine.num_cached_tokens = {0: 1}
    path = "/v1/completions" if "prompt" in asked else "/v1/chat/completions"
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"model": MODEL, "stream": True, "stream_options": options, "return_token_ids": True}
    *chunks, last = events_of(client.send("POST", path, json=fields | asked))
    num_told = 0
    for chunk in chunks:
        num_told += len(chunk["choices"][0].get("token_ids", ()))
        assert chunk["usage"]["completion_tokens"] == num_told
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (chunks[0], last)]
    assert cached[0] <= cached[1] == len(engine.requests)


def test_a_prompt_that_fails_ends_the_others(client: Client) -> None:
    class SecondFails(FakeEngine):
        async def generate(self, prepared: PreparedRequest) -> AsyncGenerator[TokenOutput, None]:
            if len(self.requests) == 1:
                self.requests.append(prepared.engine_request)
                raise self.failure
            async with aclosing(super().generate(prepared)) as tokens:
                async for token in tokens:
                    yield token

    client.engine = SecondFails(client.preparer, is_endless=True)
    assert complete(client, ["a", "b", "c"]).status_code == 500
    assert (len(client.engine.requests), client.engine.num_abandoned) == (3, 2)


class DyingEngine:
    """The first instance answers the first of two prompts, dies in the middle of the second, and is replaced."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.asked = client, list[str]()
        client.connect(self.send)

    def send(self, message: ToEngine) -> bool:
        if isinstance(message, EngineRequest):
            self.asked.append(message.request_id)
            asyncio.get_running_loop().call_soon(self.answer, message.request_id)
        return True

    def answer(self, request_id: str) -> None:
        is_last = len(self.asked) != 2 or request_id != self.asked[1]
        self.client.receive([TokenOutput(request_id, 0, 7, finish_reason="length" if is_last else None)])
        if not is_last:
            self.client.disconnect("it was killed")
            self.client.connect(self.send)


def test_prompts_repeated_after_an_engine_died_are_counted_and_recorded_once(client: Client, tmp_path: Path) -> None:
    observer = RequestObserver(ring=AccountRing.open(tmp_path, "frontend-0"))
    with closing(EngineClient(MediaPool(1), observer)) as own:
        engine = DyingEngine(own)
        response = complete(Client(client.preparer, cast(FakeEngine, own)), ["a", "b"], max_tokens=1)
    assert (response.status_code, len(engine.asked)) == (200, 4)
    numbers = observer.counters.numbers()
    assert [numbers[ENDS[each]] for each in ("length", "error", "abort")] == [2, 0, 0]
    assert numbers[PROMPT_TOKENS] == response.json()["usage"]["prompt_tokens"]
    assert [sum(numbers[slot : slot + len(BOUNDS) + 1]) for slot in (FIRST_TOKEN, WHOLE)] == [2, 2]
    assert [each.status for each in read_rings(tmp_path)] == ["length", "length"]


def test_the_token_sampled_to_score_a_prompt_alone_is_not_counted(client: Client) -> None:
    observer = RequestObserver()
    with closing(EngineClient(MediaPool(1), observer)) as own:
        DyingEngine(own)
        asking = Client(client.preparer, cast(FakeEngine, own))
        body = complete(asking, "a", echo=True, max_tokens=0, keepsight={"account": True}).json()
    [account] = body["keepsight"]["accounts"]
    assert account["completion_tokens"] == body["usage"]["completion_tokens"] == 0
    numbers = observer.counters.numbers()
    assert (numbers[ENDS["length"]], numbers[ANSWER_TOKENS]) == (1, 0)


@pytest.mark.parametrize("prompt", ["", ["", "Hello"]])
def test_an_empty_prompt_is_the_bos_token_if_the_tokenizer_adds_one(
    client: Client, engine: FakeEngine, prompt: Any
) -> None:
    assert complete(client, prompt, logprobs=1, echo=True).status_code == 200
    assert engine.requests[0].token_ids == (client.preparer.tokenizer.bos_token_id,)


def test_an_empty_prompt_without_tokens_is_refused(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.preparer.expander, "_bos_prefix", ())
    response = client.send("POST", "/v1/completions", json={"prompt": ["Hello", ""]})
    assert error_of(response) == (400, "prompt[1]", "invalid_argument")


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({"prompt": []}, "prompt", "invalid_argument"),
        ({"prompt": [[]]}, "prompt[0]", "invalid_argument"),
        ({"prompt": ["a", 1]}, "prompt[1]", "invalid_argument"),
        ({"prompt": ["a", [1.5]]}, "prompt[1]", "invalid_argument"),
        ({"prompt": [-1]}, "prompt", "invalid_argument"),
        ({"prompt": [[2], [10**9]]}, "prompt[1]", "invalid_argument"),
        ({"prompt": ["a"] * 129, "n": 2}, "prompt", "invalid_argument"),
        ({"prompt": ["a", "b " * 3000]}, "prompt[1]", "context_length_exceeded"),
        ({"prompt": "<start_of_image>"}, "prompt", "picture_count"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_field"),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_field"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_argument"),
        ({"prompt": "a", "messages": []}, "messages", "unsupported_field"),
        ({"prompt": {"a": 1}}, "prompt", "invalid_argument"),
    ],
)
def test_an_invalid_completion_is_refused_by_field_name(
    client: Client, engine: FakeEngine, fields: dict[str, Any], field: str, code: str
) -> None:
    assert error_of(client.send("POST", "/v1/completions", json=fields)) == (400, field, code)
    assert not engine.requests


# Tokens -------------------------------------------------------------------------------------------------------


def test_a_prompt_is_tokenized_and_detokenized(client: Client) -> None:
    body = client.send("POST", "/tokenize", json={"prompt": "Hello there", "return_token_strs": True}).json()
    assert body["tokens"] == list(client.preparer.tokenizer.encode("Hello there", add_bos=True))
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 2048)
    assert body["token_strs"][0] == "<bos>"
    plain = client.send("POST", "/tokenize", json={"prompt": "Hello there", "add_special_tokens": False}).json()
    assert plain["tokens"] == body["tokens"][1:]
    assert "token_strs" not in plain
    assert client.send("POST", "/detokenize", json={"tokens": plain["tokens"]}).json() == {"prompt": "Hello there"}


def test_detokenize_accepts_ids_of_the_model_that_have_no_token(client: Client) -> None:
    [hello] = client.preparer.tokenizer.encode("Hello")
    assert client.send("POST", "/detokenize", json={"tokens": [hello, 959]}).json() == {"prompt": "Hello"}
    refused = client.send("POST", "/detokenize", json={"tokens": [hello, 960]})
    assert error_of(refused)[:2] == (400, "tokens[1]")


@pytest.mark.parametrize("asked", [{"prompt": "Hello there"}, {"messages": ask("Hello")}])
def test_null_is_the_default_everywhere_when_tokens_are_asked_for(client: Client, asked: dict[str, Any]) -> None:
    nulls = dict.fromkeys(TokenizeRequest.__struct_fields__)
    plain, with_nulls = (client.send("POST", "/tokenize", json=each) for each in (asked, nulls | asked))
    assert with_nulls.status_code == 200
    assert with_nulls.json() == plain.json()


@pytest.mark.parametrize("prompt", ["Hello", "<bos>Hello", "<bos><bos>Hello", " <bos>Hello"])
def test_tokenize_gives_the_tokens_of_a_prompt_that_the_engine_gets(
    client: Client, engine: FakeEngine, prompt: str
) -> None:
    tokens = client.send("POST", "/tokenize", json={"prompt": prompt}).json()["tokens"]
    complete(client, prompt)
    assert tokens == list(engine.requests[0].token_ids)


def test_tokenize_gives_the_tokens_of_a_chat_that_the_engine_gets(client: Client, engine: FakeEngine) -> None:
    messages = ask(by_url(draw(7).picture), "What is this?")
    body = client.send("POST", "/tokenize", json={"messages": messages}).json()
    client.chat(messages=messages)
    assert body["tokens"] == list(engine.requests[0].token_ids)
    assert body["image_tokens"] == 16


def test_a_conversation_longer_than_the_context_is_counted_so_that_it_can_be_cut(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = ask(by_url(draw(7).picture), "circle " * 20_000)
    assert error_of(client.chat(messages=messages)) == (400, "messages", "context_length_exceeded")
    body = client.send("POST", "/tokenize", json={"messages": messages}).json()
    assert body["count"] == len(body["tokens"]) > 20_000 > body["max_model_len"]
    # There is a limit, though.
    for most in (body["count"] - 1, 15):
        monkeypatch.setattr(prepare_answer, "MAX_TOKEN_IDS_IN_ANSWER", most)
        refused = client.send("POST", "/tokenize", json={"messages": messages})
        assert error_of(refused) == (400, "messages", "invalid_argument")
        assert f"one answer lists at most {most}" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2, 2**70]}, "tokens[1]"),
    ],
)
def test_invalid_tokenize_requests_are_refused_by_field_name(
    client: Client, path: str, body: dict[str, Any], field: str
) -> None:
    status, named, _ = error_of(client.send("POST", path, json=body))
    assert (status, named) == (404 if field == "model" else 400, field)


# Limits -------------------------------------------------------------------------------------------------------


def test_requests_beyond_the_waiting_limit_are_refused_at_once(client: Client, engine: FakeEngine) -> None:
    async def ask_three() -> list[httpx.Response]:
        engine.is_ready = asyncio.Event()
        app = create_app(client.preparer, engine, MODEL, ApiSettings(max_waiting_requests=2))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as asking:
            body = {"messages": [{"role": "user", "content": "Hello"}]}
            waiting = [asyncio.create_task(asking.post("/v1/chat/completions", json=body)) for _ in range(2)]
            while len(engine.requests) < 2:
                await asyncio.sleep(0)
            refused = await asking.post("/v1/chat/completions", json=body)
            responses = [await asking.get("/ready"), await asking.get("/health")]
            engine.is_ready.set()
            answered = await asyncio.gather(*waiting)
            return [refused, *responses, *answered, await asking.post("/v1/chat/completions", json=body)]

    refused, ready, health, *answered = asyncio.run(ask_three())
    assert (ready.status_code, ready.json()) == (503, {"status": "overloaded"})
    assert (health.status_code, health.json()["requests"]) == (200, 2)
    assert error_of(refused) == (503, None, "server_overloaded")
    assert int(refused.headers["Retry-After"]) > 0
    assert [each.status_code for each in answered] == [200] * 3


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_client_that_is_still_sending_does_not_count_as_waiting(client: Client, path: str) -> None:
    async def ask_while_sending() -> tuple[httpx.Response, httpx.Response]:
        has_begun, may_end = asyncio.Event(), asyncio.Event()

        async def send_slowly() -> AsyncGenerator[bytes, None]:
            yield b'{"messages": [{"role": "user", '
            has_begun.set()
            await may_end.wait()
            yield b'"content": "Hello"}]}'

        app = create_app(client.preparer, client.engine, MODEL, ApiSettings(max_waiting_requests=1))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as asking:
            slow = asyncio.create_task(asking.post(path, content=send_slowly()))
            await has_begun.wait()
            meanwhile = await asking.post(path, json={"messages": HELLO})
            may_end.set()
            return meanwhile, await slow

    assert [each.status_code for each in asyncio.run(ask_while_sending())] == [200, 200]


def test_a_full_server_refuses_a_request_before_its_body_is_read(client: Client) -> None:
    client.settings = ApiSettings(max_waiting_requests=0)
    assert error_of(client.send("POST", "/tokenize", content=never_read())) == (503, None, "server_overloaded")


async def never_read() -> AsyncGenerator[bytes, None]:
    raise AssertionError("the body was read")
    yield b""


def test_a_body_that_is_announced_as_too_large_is_refused_unread(client: Client) -> None:
    client.settings = ApiSettings(max_body_bytes=10)
    response = client.send("POST", "/tokenize", content=never_read(), headers={"Content-Length": "11"})
    assert error_of(response) == (413, "body", "body_too_large")


def test_a_compressed_body_is_refused(client: Client) -> None:
    response = client.send("POST", "/tokenize", content=b"{}", headers={"Content-Encoding": "gzip"})
    assert error_of(response) == (415, "body", "unsupported_body")
    not_compressed = client.send(
        "POST", "/tokenize", content=b'{"prompt": "a"}', headers={"Content-Encoding": "Identity"}
    )
    assert not_compressed.status_code == 200


def test_a_stalled_body_times_out(client: Client) -> None:
    client.settings = ApiSettings(slow_client_seconds=0.05)

    async def slow() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    assert error_of(client.send("POST", "/tokenize", content=slow())) == (408, "body", "body_timeout")


# Arbitrary bodies ---------------------------------------------------------------------------------------------

prompts = st.one_of(
    texts, st.lists(texts | st.lists(st.integers(-1, 700)), max_size=3), st.lists(st.integers(-1, 700)), json_values
)
completion_bodies = st.builds(
    lambda prompt, fields: {"prompt": prompt} | fields,
    prompts,
    st.dictionaries(field_names, small, max_size=2) | st.just({}),
)
token_bodies = st.dictionaries(st.sampled_from(["prompt", "messages", "tokens", "model"]), prompts, max_size=2)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/completions", "/tokenize", "/detokenize"]),
    body=completion_bodies | token_bodies | json_values,
)
def test_no_body_makes_the_smaller_endpoints_fail(client: Client, path: str, body: Any) -> None:
    response = client.send("POST", path, content=json.dumps(body).encode())
    event(f"{path} {response.status_code}")
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response)


# Request ids and the log --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "is_kept"), [("abc-1.2_3:4", True), ("a b", False), ("x" * 129, False), ("", False)])
def test_every_response_has_a_request_id_from_the_caller_if_valid(client: Client, asked: str, is_kept: bool) -> None:
    for path in ("/health", "/nothing", "/v1/models"):
        named = client.send("GET", path, headers={"X-Request-Id": asked}).headers["X-Request-Id"]
        assert (named == asked) == is_kept
        assert named


def test_the_log_has_a_line_for_each_request_that_cannot_be_forged(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "keepsight.frontend.api.request_log"):
        client.chat()
        client.chat(stream=True)
        client.send("GET", "/a%0aPOST%20/b")
        client.send("GET", "/health")
    lines = [record.getMessage() for record in caplog.records]
    whole, stream, forged = lines
    for line in (whole, stream):
        assert line.startswith("POST /v1/chat/completions 200 in ")
        assert "(0 cached, 0 of pictures), 6 of answer; ms: identify " in line
    assert forged.startswith("GET /a%0APOST%20/b 404")
    client.settings = ApiSettings(log_requests=False)
    client.chat()
    assert len(caplog.records) == len(lines)


@pytest.mark.parametrize("is_logged", [True, False])
def test_a_client_that_left_is_logged_only_if_requests_are(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_logged: bool
) -> None:
    def leave(_prepared: PreparedRequest) -> NoReturn:
        raise ClientDisconnect

    client.settings = ApiSettings(log_requests=is_logged)
    monkeypatch.setattr(client.engine, "generate", leave)
    with caplog.at_level(logging.INFO, "keepsight"):
        assert client.chat().status_code == 499
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == is_logged
    assert all(line.startswith("POST /v1/chat/completions 499 in ") for line in lines)


@pytest.mark.parametrize("error", [RuntimeError(), RequestFailedError("no")])
def test_a_failing_request_s_path_is_escaped_in_the_log(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> NoReturn:
        raise error

    app = create_app(client.preparer, client.engine, MODEL, view=ServerView(read_accounts=fail))
    monkeypatch.setattr(client, "make_app", lambda: app)
    with caplog.at_level(logging.INFO, "keepsight.frontend.api.app"):
        client.send("GET", "/debug/requests/[2J%e2%80%a8%e2%80%ae")
    [line] = [record.getMessage() for record in caplog.records if record.name == "keepsight.frontend.api.app"]
    assert line.startswith("GET /debug/requests/%5B2J%E2%80%A8%E2%80%AE")


def test_a_very_long_path_is_not_logged_whole(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "keepsight.frontend.api.request_log"):
        client.send("GET", "/" + "^" * 60_000)
    [line] = [record.getMessage() for record in caplog.records if record.name == "keepsight.frontend.api.request_log"]
    assert line.startswith("GET /%5E%5E")
    assert len(line) < 1000


def test_a_very_long_prompt_does_not_block_other_requests(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def parse(body: Buffer) -> CompletionRequest:
        threads.append(threading.current_thread())
        return parse_completion_request(body)

    monkeypatch.setattr(app_module, "parse_completion_request", parse)
    body = {"model": MODEL, "prompt": [2] * app_module.MAX_TOKEN_IDS_ON_LOOP}
    assert error_of(client.send("POST", "/v1/completions", json=body))[:2] == (400, "prompt")
    [thread] = threads
    assert thread is not threading.main_thread(), "which runs the event loop"
