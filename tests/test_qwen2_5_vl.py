"""Qwen2.5-VL end to end: ids, pictures and answers equal those of transformers.

What it shares with Qwen3-VL is tested in `test_qwen3_vl.py`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from keepsight import LLM, SamplingParams
from keepsight.requests import Pixels
from tests.drawn import ask, to_data_url
from tests.frontend import sample_films
from tests.place import placed
from tests.qwen_checkpoint import QWEN2_5_VL, make_qwen_checkpoint, reference_answer
from tests.real_server import real_server

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = [(40, 30), (200, 90), (17, 300), (1, 1), (150, 150)]
PICTURES = [np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8) for width, height in SIZES]
WITHOUT_CACHES: dict[str, Any] = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0, "encoder_cache_gb": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen2_5-vl")
    return directory, make_qwen_checkpoint(directory, seed=3, shape=QWEN2_5_VL)


def load(directory: Path, **options: Any) -> LLM:
    # Of transformers' two image backends, the one that does not need torchvision.
    return LLM(directory, **placed(image_backend="pil", max_num_batched_tokens=32, max_num_seqs=8, **options))


def show(*pictures: Pixels) -> list[dict[str, Any]]:
    return ask(*({"type": "image", "image": each} for each in pictures), "What is it?")


def reference_ids(directory: Path, pictures: list[Pixels]) -> list[int]:
    """Return prompt ids by Qwen2_5_VLProcessor's rule; the processor cannot be built without torchvision."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    images: Any = Qwen2VLImageProcessorPil.from_pretrained(directory)
    text = tokenizer.apply_chat_template(show(*pictures), tokenize=False, add_generation_prompt=True)
    inputs = images(images=pictures, return_tensors="np")
    processor: Any = SimpleNamespace(image_processor=images, image_token="<|image_pad|>")
    first, *others = text.split(processor.image_token)
    for index, after in enumerate(others):
        first += Qwen2_5_VLProcessor.replace_image_token(processor, inputs, index) + after
    token_ids: list[int] = tokenizer(first)["input_ids"]
    return token_ids


@pytest.mark.parametrize("options", [{}, WITHOUT_CACHES], ids=["cached", "not cached"])
def test_answers_about_pictures_of_any_size_equal_the_reference_s(
    checkpoint: tuple[Path, Any], options: dict[str, Any]
) -> None:
    directory, reference = checkpoint
    prompts = [[each] for each in PICTURES] + [PICTURES[:3], PICTURES[:1]]
    with load(directory, **options) as llm:
        outputs = llm.chat([show(*pictures) for pictures in prompts], GREEDY)
        [again] = llm.chat(show(*PICTURES[:3]), GREEDY)
    for pictures, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == reference_ids(directory, pictures)
        theirs = reference_answer(reference, directory, output.prompt_token_ids, pictures, 8)
        assert output.outputs[0].token_ids[: len(theirs)] == theirs
    assert again.outputs[0].token_ids == outputs[-2].outputs[0].token_ids
    assert again.num_cached_tokens == (0 if options else len(again.prompt_token_ids) - 1)


# Films --------------------------------------------------------------------------------------------------------


# A size that needs no resizing: six tokens.
FILM = np.random.default_rng(1).integers(0, 256, (49, 56, 84, 3), np.uint8)
# Two of the 24 frames per second, but at least four.
FRAMES = FILM[[0, 12, 24, 36]]


def show_film(beside: Pixels, rate: float) -> list[dict[str, Any]]:
    film = {"type": "video", "video": (FILM, {"fps": rate})}
    return ask({"type": "image", "image": beside}, film, "What happens?", {"type": "image", "image": beside})


@pytest.mark.parametrize("options", [{}, WITHOUT_CACHES], ids=["cached", "not cached"])
def test_answers_about_films_equal_the_reference_s_at_each_frame_rate(
    checkpoint: tuple[Path, Any], options: dict[str, Any]
) -> None:
    directory, reference = checkpoint
    beside, outputs = PICTURES[0], []
    with load(directory, **options) as llm:
        for rate in (24, 12, 24):
            [output] = llm.chat(show_film(beside, rate), GREEDY, mm_processor_kwargs={"num_frames": 4})
            ids, two_frames = output.prompt_token_ids, 2 * 49 / (4 * rate)
            theirs = reference_answer(reference, directory, ids, [beside, beside], 8, FRAMES, two_frames)
            assert output.outputs[0].token_ids[: len(theirs)] == theirs
            outputs.append(output)
    config, ids = reference.config, outputs[0].prompt_token_ids
    begin = ids.index(config.video_token_id)
    moments = [config.video_token_id] * 12
    assert ids[begin - 1 : begin + 13] == [config.vision_start_token_id, *moments, config.vision_end_token_id]
    found = [output.num_cached_tokens for output in outputs]
    # After its first moment the slower film has other positions in the decoder.
    assert found == ([0, 0, 0] if options else [0, begin + 6, len(ids) - 1])


def test_a_film_file_is_answered_over_http_as_by_llm(checkpoint: tuple[Path, Any]) -> None:
    film = {"type": "video_url", "video_url": {"url": to_data_url(sample_films.film(), "video/mp4")}}
    messages = ask(film, "What happens?")
    with load(checkpoint[0]) as llm:
        [output] = llm.chat(messages, GREEDY)
    with real_server(str(checkpoint[0])) as server:
        client: Any = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model=str(checkpoint[0]),
            messages=messages,
            temperature=0,
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].message.content == output.outputs[0].text
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids)
