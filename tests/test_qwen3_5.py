"""Qwen3.5 end to end: answers about pictures, films and texts equal those of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepsight import LLM
from keepsight.errors import KeepsightError
from keepsight.models.qwen3_5.model import Qwen35
from keepsight.models.registry import load_model
from tests.drawn import ask
from tests.place import placed
from tests.qwen_checkpoint import QWEN3_5, QWEN3_5_MIXTURE, make_qwen_checkpoint, reference_answer
from tests.qwen_turns import GREEDY, expect_reference_answers_in_turns, film, picture, shown
from tests.runner.small_model import PLACE

Checkpoint = tuple[Path, Any]


@pytest.fixture(scope="module", params=[(1, QWEN3_5), (4, QWEN3_5), (3, QWEN3_5_MIXTURE)], ids=["1", "4", "mixture"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory, (seed, shape) = tmp_path_factory.mktemp("qwen3.5"), request.param
    return directory, make_qwen_checkpoint(directory, seed, shape)


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Iterator[LLM]:
    # Of transformers' two image backends, the one that does not need torchvision.
    llm = LLM(checkpoint[0], **placed(image_backend="pil", max_num_batched_tokens=32, max_num_seqs=8))
    yield llm
    llm.close()


def test_pictures_of_several_sizes_in_several_turns_are_answered_as_by_transformers(
    llm: LLM, checkpoint: Checkpoint
) -> None:
    question = "And these? What can be seen on them, and where is it?"
    conversation, theirs = expect_reference_answers_in_turns(llm, checkpoint, question)
    [again] = llm.chat(conversation, GREEDY)
    assert again.outputs[0].token_ids[: len(theirs)] == theirs
    # All but the last block, which is not full.
    assert again.num_cached_tokens > len(again.prompt_token_ids) - 17


def test_another_question_about_a_picture_begins_behind_it(llm: LLM, checkpoint: Checkpoint) -> None:
    seen, before = picture(160, 120, 7), "Look at this picture as closely as you can:"
    [first] = llm.chat(ask(before, *shown(seen), "What is it?"), GREEDY)
    [other] = llm.chat(ask(before, *shown(seen), "Who made it, and when was that?"), GREEDY)
    picture_token = checkpoint[1].config.image_token_id
    end = max(place for place, token_id in enumerate(other.prompt_token_ids) if token_id == picture_token) + 1
    assert first.num_cached_tokens < other.num_cached_tokens
    assert other.num_cached_tokens > end - 16
    theirs = reference_answer(checkpoint[1], checkpoint[0], other.prompt_token_ids, [seen], 8)
    assert other.outputs[0].token_ids[: len(theirs)] == theirs


def test_a_film_is_answered_as_by_transformers(llm: LLM, checkpoint: Checkpoint) -> None:
    video, still = film(49), picture(40, 60, 1)
    [output] = llm.chat(ask(*shown(still), {"type": "video", "video": video}, "What happens?"), GREEDY)
    directory, reference = checkpoint
    # Two of the 24 frames per second, but at least four.
    frames = video[[0, 16, 32, 48]]
    theirs = reference_answer(reference, directory, output.prompt_token_ids, [still], 8, frames)
    assert output.outputs[0].token_ids[: len(theirs)] == theirs


def test_its_pictures_are_encoded_by_keepsight_s_own_tower(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint[0], PLACE)
    assert isinstance(model, Qwen35)
    assert not model.shape.takes_arrays
    of_reference = sum(each.numel() for each in checkpoint[1].parameters())
    is_tied = checkpoint[1].config.tie_word_embeddings
    head = 0 if is_tied else checkpoint[1].get_output_embeddings().weight.numel()
    assert sum(each.numel() for each in model.parameters()) in (of_reference, of_reference + head)


def test_a_disk_for_prompts_is_refused_by_its_option(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(KeepsightError, match="prefix_disk_cache: must not be set: this model has recurrent layers"):
        LLM(checkpoint[0], **placed(prefix_disk_cache=tmp_path / "prefixes"))
