import math
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import openai
import pytest

from keepsight.frontend.api.chat_response import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChoiceLogprobs,
)
from keepsight.frontend.api.response_parts import ContentLogprob, ModelCard, ModelList, TopLogprob, Usage, to_finite
from keepsight.frontend.http.error_response import ErrorDetail, ErrorResponse


def answer_with(body: Any, status: int = 200, kind: str = "application/json") -> openai.OpenAI:
    """Return an official client whose every request is answered with `body`."""
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content, headers={"content-type": kind}))
    http_client: Any = httpx.Client(transport=transport)  # the client's own is an httpx2 client; httpx works too
    return openai.OpenAI(base_url="http://test/v1", api_key="x", http_client=http_client, max_retries=0)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(model="demo", messages=[{"role": "user", "content": "hi"}], **options)


def make_logprobs() -> ChoiceLogprobs:
    likeliest = TopLogprob(token="a", logprob=-0.5, byte_values=[97])
    impossible = TopLogprob(token="\ufffd", logprob=to_finite(-math.inf), byte_values=[0xE2])
    first = ContentLogprob(token="a", logprob=-0.5, byte_values=[97], top_logprobs=[likeliest, impossible])
    return ChoiceLogprobs(content=[first])


def test_the_official_client_reads_an_answer() -> None:
    choice = ChatChoice(
        index=0, message=ChatMessage(content="a"), finish_reason="stop", logprobs=make_logprobs(), stop_reason="x"
    )
    usage = Usage.count(num_prompt_tokens=20, num_completion_tokens=1, num_image_tokens=16, num_cached_tokens=5)
    body = ChatCompletion(id="chatcmpl-1", created=1, model="demo", choices=[choice], usage=usage)
    answer = ask(answer_with(body))
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "a"
    assert answer.choices[0].message.refusal is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 21
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.usage.prompt_tokens_details.image_tokens == 16
    (logprob,) = answer.choices[0].logprobs.content
    assert (logprob.token, logprob.bytes) == ("a", [97])
    assert [(top.token, top.logprob, top.bytes) for top in logprob.top_logprobs] == [
        ("a", -0.5, [97]),
        ("\ufffd", -9999.0, [0xE2]),
    ]


def test_the_official_client_reads_a_stream() -> None:
    def chunk(*choices: ChatChunkChoice, usage: Usage | None = None) -> bytes:
        body = ChatCompletionChunk(id="chatcmpl-1", created=1, model="demo", choices=list(choices), usage=usage)
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    stream = (
        chunk(ChatChunkChoice(index=0, delta=ChatDelta(role="assistant", content="")))
        + chunk(ChatChunkChoice(index=0, delta=ChatDelta(content="a"), logprobs=make_logprobs()))
        + chunk(ChatChunkChoice(index=0, delta=ChatDelta(), finish_reason="length"))
        + chunk(usage=Usage.count(3, 1, 0, 0))
        + b"data: [DONE]\n\n"
    )
    chunks = list(ask(answer_with(stream, kind="text/event-stream"), stream=True))
    assert [choice.delta.content for chunk in chunks for choice in chunk.choices] == ["", "a", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[2].choices[0].finish_reason == "length"
    assert [chunk.usage and chunk.usage.total_tokens for chunk in chunks] == [None, None, None, 4]


def test_the_official_client_reads_models_and_errors() -> None:
    of_anthropic: Any = {"display_name": "demo", "created_at": datetime.fromtimestamp(1, UTC), "max_input_tokens": 2048}
    listed = ModelCard(id="demo", root="demo", created=1, max_model_len=2048, **of_anthropic)
    models = ModelList(data=[listed], first_id="demo", last_id="demo")
    (card,) = answer_with(models).models.list().data
    assert (card.id, card.object, card.owned_by) == ("demo", "model", "keepsight")
    detail = ErrorDetail(message="n: must be 1", type="invalid_request_error", param="n", code="invalid_argument")
    with pytest.raises(openai.BadRequestError, match="n: must be 1") as caught:
        ask(answer_with(ErrorResponse(error=detail), status=400))
    assert (caught.value.param, caught.value.code) == ("n", "invalid_argument")
