"""Qwen3-VL as its users have it: from a folder, pictures of any size and words to the answers of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepsight import LLM, SamplingParams
from keepsight.requests import Pixels
from tests.drawn import ask
from tests.qwen_checkpoint import make_qwen_checkpoint, reference_answer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = [(40, 30), (200, 90), (17, 300), (1, 1), (64, 64)]


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def shown(*pictures: Pixels) -> list[dict[str, Any]]:
    return [{"type": "image", "image": each} for each in pictures]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen3-vl")
    return directory, make_qwen_checkpoint(directory)


@pytest.fixture(scope="module")
def llm(checkpoint: tuple[Path, Any]) -> Iterator[LLM]:
    # Of transformers' two, the one that needs no torchvision.
    llm = LLM(checkpoint[0], device="cpu", image_backend="pil", max_num_batched_tokens=32, max_num_seqs=8)
    yield llm
    llm.close()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_answer_about_a_picture_of_any_size_is_the_reference_s(
    llm: LLM, checkpoint: tuple[Path, Any], size: tuple[int, int]
) -> None:
    seen = picture(*size)
    [output] = llm.chat(ask(*shown(seen), "What is it?"), GREEDY)
    directory, reference = checkpoint
    theirs = reference_answer(reference, directory, output.prompt_token_ids, [seen], 8)
    assert output.outputs[0].token_ids[: len(theirs)] == theirs


def test_pictures_of_several_sizes_in_turns_that_are_found_again(llm: LLM, checkpoint: tuple[Path, Any]) -> None:
    first, second, third = picture(40, 60, 1), picture(150, 40, 2), picture(33, 33, 3)
    conversation = ask(*shown(first, second), "And these?")
    directory, reference = checkpoint
    for pictures in ([first, second], [first, second, third]):
        [output] = llm.chat(conversation, GREEDY)
        theirs = reference_answer(reference, directory, output.prompt_token_ids, pictures, 8)
        assert output.outputs[0].token_ids[: len(theirs)] == theirs
        assistant = {"role": "assistant", "content": [{"type": "text", "text": "Squares."}]}
        conversation = [*conversation, assistant, *ask(*shown(third), "One more.")]
    [again] = llm.chat(conversation[:-2], GREEDY)
    assert again.num_cached_tokens == len(again.prompt_token_ids) - 1
