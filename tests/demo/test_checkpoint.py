"""The checkpoint, run by transformers: it is small, answers correctly and depends on the order of image tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor, Gemma3ForConditionalGeneration

from keepsight.demo import checkpoint_path
from keepsight.demo.draw_scene import draw_scene
from keepsight.demo.questions import describe_scene, mention_scene
from keepsight.demo.scenes import Scene, plain_look, random_number_scene, random_scene

MAX_BYTES = 8_000_000
TOKENS_PER_SIDE = 4


class Demo:
    def __init__(self) -> None:
        from_pretrained: Any = AutoProcessor.from_pretrained
        self.processor = from_pretrained(checkpoint_path())
        self.model: Any = Gemma3ForConditionalGeneration.from_pretrained(checkpoint_path(), dtype=torch.float32)

    def answer(self, scenes: list[Scene], question: str) -> str:
        content = [*({"type": "image"} for _ in scenes), {"type": "text", "text": question}]
        prompt = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        pictures = [[draw_scene(scene) for scene in scenes]] if scenes else None
        inputs = self.processor(text=[prompt], images=pictures, return_tensors="pt", add_special_tokens=False)
        inputs.pop("num_crops", None)
        tokens = self.model.generate(**inputs, max_new_tokens=80, do_sample=False)
        new_tokens = tokens[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.tokenizer.decode(new_tokens, skip_special_tokens=True)).strip()


@pytest.fixture(scope="module")
def demo() -> Demo:
    torch.manual_seed(0)
    return Demo()


def held_out_scenes(num_things: int, num_scenes: int = 1) -> list[Scene]:
    random = Random(f"a test of {num_things}")
    return [random_scene(random, num_things, look=plain_look(224)) for _ in range(num_scenes)]


def test_the_checkpoint_is_at_most_eight_megabytes() -> None:
    assert sum(file.stat().st_size for file in checkpoint_path().iterdir()) <= MAX_BYTES


def test_the_config_has_the_keys_of_older_readers() -> None:
    config = json.loads((checkpoint_path() / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert {"rope_theta", "rope_local_base_freq", "sliding_window_pattern"} <= config["text_config"].keys()


@pytest.mark.parametrize("scene", held_out_scenes(1, 6))
def test_one_thing_is_described_exactly(demo: Demo, scene: Scene) -> None:
    assert demo.answer([scene], "What is in this picture?") == describe_scene(scene)


@pytest.mark.parametrize("num_things", [2, 3, 4])
def test_several_things_are_described_exactly(demo: Demo, num_things: int) -> None:
    (scene,) = held_out_scenes(num_things)
    assert demo.answer([scene], "Describe this picture.") == describe_scene(scene)


def test_each_of_four_pictures_is_found_by_its_position(demo: Demo) -> None:
    scenes = held_out_scenes(1, 4)
    for ordinal, scene in zip(("first", "second", "third", "fourth"), scenes, strict=True):
        assert demo.answer(scenes, f"What is in the {ordinal} picture?") == describe_scene(scene)


def test_pictures_are_listed_in_order(demo: Demo) -> None:
    scenes = held_out_scenes(1, 3)
    expected = " ".join(f"{place}: {mention_scene(scene)}." for place, scene in enumerate(scenes, 1))
    assert demo.answer(scenes, "List the pictures.") == expected


@pytest.mark.parametrize("num_digits", [1, 2, 3])
def test_a_number_is_read(demo: Demo, num_digits: int) -> None:
    scene = random_number_scene(Random(num_digits), num_digits=num_digits, look=plain_look(224))
    assert demo.answer([scene], "What number is written?") == describe_scene(scene)


def test_without_a_picture_the_answer_says_so(demo: Demo) -> None:
    assert demo.answer([], "What is in this picture?") == "There is no picture."


@pytest.mark.parametrize("num_pictures", [0, 1])
def test_unknown_properties_are_not_guessed(demo: Demo, num_pictures: int) -> None:
    scenes = held_out_scenes(1, num_pictures)
    assert demo.answer(scenes, "What is the capital of France?") == "I only know coloured shapes in pictures."


def test_the_order_of_a_pictures_tokens_matters(demo: Demo) -> None:
    """A server that scatters soft tokens column by column would give wrong answers."""
    scenes = [scene for scene in held_out_scenes(1, 40) if scene.things[0].cell % 4][:6]
    with soft_tokens_column_by_column(demo.model):
        answers = [demo.answer([scene], "Where is the shape?") for scene in scenes]
    expected = [f"{scene.things[0].position}." for scene in scenes]
    num_right = sum(answer.lower() == right for answer, right in zip(answers, expected, strict=True))
    assert num_right <= 1


@contextmanager
def soft_tokens_column_by_column(model: Any) -> Iterator[None]:
    def transpose(module: Any, inputs: Any, soft_tokens: Tensor) -> Tensor:
        grid = soft_tokens.view(len(soft_tokens), TOKENS_PER_SIDE, TOKENS_PER_SIDE, -1)
        return grid.transpose(1, 2).reshape(soft_tokens.shape)

    handle = model.model.multi_modal_projector.register_forward_hook(transpose)
    try:
        yield
    finally:
        handle.remove()
