"""Pictures of models that are none of ours: seen and answered as transformers does, by the arrays of its processors."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.layers import Placement
from keepsight.models.registry import load_model
from keepsight.pixels import carry_arrays
from tests.models.borrowed import by_pages
from tests.models.borrowed import reference as ref
from tests.models.judged import assert_close

PLACE = Placement(torch.device("cpu"), torch.float32)
IMAGE, BREAK, END = 299, 298, 297
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


class Family(NamedTuple):
    text_type: str
    vision: Mapping[str, Any]
    others: Mapping[str, Any]
    # What its processor makes of one picture, all but the pixels' values.
    pixels_shape: tuple[int, ...]
    arrays: Mapping[str, Tensor]
    # Which stand for it.
    token_ids: list[int]


FAMILIES = {
    "LlavaForConditionalGeneration": Family(
        "llama", {"model_type": "clip_vision_model"}, {}, (1, 3, 32, 32), {}, [IMAGE] * 16
    ),
    "Idefics3ForConditionalGeneration": Family(
        "llama", {}, {"scale_factor": 2}, (1, 2, 3, 32, 32),
        {"pixel_attention_mask": torch.ones(1, 2, 32, 32, dtype=torch.int64)},
        [BREAK, *[IMAGE] * 4, BREAK, *[IMAGE] * 4, END],
    ),
    "SmolVLMForConditionalGeneration": Family(
        "llama", {}, {"scale_factor": 2}, (1, 3, 3, 32, 32), {}, [BREAK, *[IMAGE] * 12, END]
    ),
    "InternVLForConditionalGeneration": Family(
        "qwen2", {"image_size": [32, 32], "patch_size": [8, 8]}, {}, (2, 3, 32, 32), {}, [IMAGE] * 8
    ),
    "Mistral3ForConditionalGeneration": Family(
        "mistral", {"model_type": "pixtral"}, {"spatial_merge_size": 2}, (1, 3, 32, 48),
        {"image_sizes": torch.tensor([[32, 48]])},
        [IMAGE, IMAGE, IMAGE, BREAK, IMAGE, IMAGE, IMAGE, END],
    ),
    "AyaVisionForConditionalGeneration": Family(
        "cohere2", {"model_type": "siglip_vision_model"}, {}, (2, 3, 32, 32), {},
        [BREAK, *[IMAGE] * 4, END, *[IMAGE] * 4],
    ),
}  # fmt: skip


class Pair(NamedTuple):
    model: BorrowedModel
    reference: Any
    family: Family

    def draw(self, seed: int) -> dict[str, Tensor]:
        """The arrays of one picture."""
        values = torch.randn(self.family.pixels_shape, generator=torch.Generator().manual_seed(seed))
        return {"pixel_values": values, **self.family.arrays}

    def encode(self, arrays: Mapping[str, Tensor], token_ids: list[int] | None = None) -> Tensor:
        """[tokens, hidden]"""
        told = torch.tensor(token_ids or self.family.token_ids, dtype=torch.int32)
        carried = carry_arrays({name: each.numpy() for name, each in {**arrays, "token_ids": told}.items()})
        with torch.inference_mode():
            return self.model.encode_images(torch.from_numpy(carried.copy())[None])[0]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory, family = tmp_path_factory.mktemp(request.param), FAMILIES[request.param]
    arguments = {
        "text_config": {**ref.SMALL, "model_type": family.text_type},
        "vision_config": {**VISION, **family.vision},
        "image_token_id": IMAGE,
        **family.others,
    }
    reference = ref.make_checkpoint(directory, request.param, arguments)
    model = load_model(directory, PLACE)
    assert isinstance(model, BorrowedModel)
    return Pair(model, reference, family)


def test_a_picture_between_words_is_answered_as_by_transformers(pair: Pair) -> None:
    before, behind = torch.arange(3, 9), torch.arange(30, 51)
    picture, arrays = torch.tensor(pair.family.token_ids), pair.draw(0)
    with torch.inference_mode():
        prompt = torch.cat((before, picture, behind))
        expected = pair.reference(input_ids=prompt[None], use_cache=False, **arrays).logits[0]
        words = [pair.model.embed_tokens(each) for each in (before, behind)]
        without = torch.cat((words[0], pair.model.embed_tokens(picture), words[1]))
    embeddings = torch.cat((words[0], pair.encode(arrays), words[1]))
    assert_close(by_pages.at_once(pair.model, embeddings), expected)
    assert_close(by_pages.in_parts(pair.model, embeddings, (10, 20), without), expected)
    # The picture matters.
    assert (by_pages.at_once(pair.model, without) - expected).abs().max() > 0.1


def test_tokens_that_are_none_of_the_picture_s_embeddings_are_the_model_s_own(pair: Pair) -> None:
    picture = torch.tensor(pair.family.token_ids)
    embeddings, marks = pair.encode(pair.draw(0)), picture != IMAGE
    with torch.inference_mode():
        assert torch.equal(embeddings[marks], pair.model.embed_tokens(picture[marks]))


def test_another_picture_in_the_same_place_is_another(pair: Pair) -> None:
    assert (pair.encode(pair.draw(0)) - pair.encode(pair.draw(1))).abs().max() > 0.1


def test_a_picture_laid_out_otherwise_than_it_is_encoded_fails_with_the_numbers(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"not laid out as it is encoded: 3 tokens stand for .*\[\d+, 64\]"):
        pair.encode(pair.draw(0), [IMAGE] * 3)
