"""Qwen2-Audio end to end: answers about sounds and texts equal those of transformers."""

import base64
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from keepsight import LLM, SamplingParams
from tests.drawn import ask, say
from tests.frontend.sample_sounds import RATE, as_floats, drawn, sound, wav
from tests.models.qwen2_audio import reference as ref
from tests.place import placed
from tests.real_server import START_SECONDS, real_server
from tests.sound_checkpoint import make_sound_checkpoint

SEED, NUM_TOKENS = 1, 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen2-audio")
    return directory, make_sound_checkpoint(directory, SEED)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    llm = LLM(checkpoint[0], **placed(max_num_batched_tokens=32, max_num_seqs=8))
    yield llm
    llm.close()


def by_transformers(checkpoint: tuple[Path, Any], prompt_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return transformers' greedy answer about drawn sounds of these lengths."""
    sounds = [as_floats(drawn(length)) for length in lengths]
    inputs = ref.reference_inputs(prompt_ids, sounds, ref.sound_config(ref.draw_config(SEED)))
    ended = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    output = checkpoint[1].generate(**inputs, max_new_tokens=NUM_TOKENS, **ended)
    answer: list[int] = output[0, len(prompt_ids) :].tolist()
    return answer


def audio_part(num_samples: int) -> dict[str, Any]:
    return {"type": "audio", "audio": as_floats(drawn(num_samples))}


@pytest.mark.parametrize("lengths", [[961], [9_001], [RATE, 5_000, RATE]], ids=str)
def test_answers_about_sounds_of_any_length_equal_the_reference_s(
    llm: LLM, checkpoint: tuple[Path, Any], lengths: list[int]
) -> None:
    messages = ask(*map(audio_part, lengths), "What is that?")
    [output] = llm.chat(messages, GREEDY)
    assert output.outputs[0].token_ids == by_transformers(checkpoint, output.prompt_token_ids, lengths)
    [again] = llm.chat(messages, GREEDY)
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1


def test_a_written_prompt_takes_sounds_in_the_forms_of_vllm(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    written = "Audio 1: <|audio_bos|><|AUDIO|><|audio_eos|>\nAnd <|audio_bos|><|AUDIO|><|audio_eos|>?"
    both = [(as_floats(drawn(9_000)), RATE), wav(5_000)]
    [output] = llm.generate({"prompt": written, "multi_modal_data": {"audio": both}}, GREEDY)
    assert output.outputs[0].token_ids == by_transformers(checkpoint, output.prompt_token_ids, [9_000, 5_000])


def test_a_server_recognizes_a_sound_however_it_is_sent(checkpoint: tuple[Path, Any]) -> None:
    model, recorded, flac = str(checkpoint[0]), wav(9_001), sound("flac", "flac", 9_001)
    as_openai = {"type": "input_audio", "input_audio": {"data": base64.b64encode(recorded).decode(), "format": "wav"}}
    as_url = {"type": "audio_url", "audio_url": {"url": f"data:audio/flac;base64,{base64.b64encode(flac).decode()}"}}
    answers = []
    with real_server(model) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        headers = {"Content-Type": "audio/wav"}
        uploaded = httpx.post(f"{server.url}/v1/media", content=recorded, headers=headers, timeout=START_SECONDS)
        handle = uploaded.raise_for_status().json()
        assert (handle["num_samples"], "width" in handle) == (9_001, False)
        for part in (as_openai, as_url, {"type": "audio", "media_id": handle["id"]}):
            content: Any = [part, say("What is that?")]
            answer = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=NUM_TOKENS,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            answers.append(answer.model_dump())
        metrics = httpx.get(f"{server.url}/metrics", timeout=START_SECONDS).text
        _check_other_endpoints(client, server.url, model, as_openai)
    # That both files hold the same sound is known only after decoding the second, and helps later requests.
    for name, expected in (("decoded", "2"), ("encoded", "2")):
        assert re.findall(rf'^keepsight_media_{name}_total\{{modality="audio"\}} (\d+)', metrics, re.M) == [expected]
    theirs = by_transformers(checkpoint, answers[0]["prompt_token_ids"], [9_001])
    assert [each["choices"][0]["token_ids"] for each in answers] == [theirs] * 3
    assert answers[0]["usage"]["prompt_tokens_details"]["audio_tokens"] == 14


def _check_other_endpoints(client: OpenAI, url: str, model: str, part: dict[str, Any]) -> None:
    """Check that each endpoint counts the same tokens."""
    body = {"messages": [{"role": "user", "content": [part, say("What is that?")]}]}
    counted = httpx.post(f"{url}/tokenize", json=body, timeout=START_SECONDS).raise_for_status().json()
    assert (counted["audio_tokens"], counted["image_tokens"]) == (14, 0)
    content: Any = [part, {"type": "input_text", "text": "What is that?"}]
    response = client.responses.create(
        model=model, input=[{"role": "user", "content": content}], max_output_tokens=2, temperature=0
    )
    assert response.usage is not None
    assert response.usage.input_tokens == counted["count"]
    too_long = body | {"messages": [_with(wav(RATE + 160))]}
    wrong = httpx.post(f"{url}/v1/chat/completions", json=too_long, timeout=START_SECONDS)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (413, "picture_too_large")
    assert "has 1.01 seconds, this model takes at most 1 seconds" in wrong.json()["error"]["message"]


def _with(data: bytes) -> dict[str, Any]:
    sent = {"data": base64.b64encode(data).decode(), "format": "wav"}
    return {"role": "user", "content": [{"type": "input_audio", "input_audio": sent}]}
