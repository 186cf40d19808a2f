"""Pictures for models that are not ours: with the arrays of their processors, answers equal transformers'."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from keepsight.models.borrowed.model import BorrowedModel
from keepsight.models.layers import Placement
from keepsight.models.registry import load_model
from tests.models.borrowed import by_pages
from tests.models.borrowed.pictures import FAMILIES, GEMMA4, GEMMA4_LARGE, GLM4V, IMAGE, LLAVA, Family
from tests.models.judged import assert_close

PLACE = Placement(torch.device("cpu"), torch.float32)


class Pair(NamedTuple):
    model: BorrowedModel
    reference: Any
    family: Family

    def encode(self, seed: int, token_ids: Sequence[int] = ()) -> Tensor:
        """[tokens, hidden]"""
        with torch.inference_mode():
            carried = torch.from_numpy(self.family.carry(seed, token_ids).copy())
            return self.model.encode_images(carried[None])[0]


def name_family(family: Family) -> str:
    return f"{family.architecture} {family.text.get('use_bidirectional_attention', '')}"


@pytest.fixture(scope="module", params=FAMILIES, ids=name_family)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family: Family = request.param
    directory = tmp_path_factory.mktemp(family.architecture)
    reference, model = family.make_checkpoint(directory), load_model(directory, PLACE, model_impl="transformers")
    assert isinstance(model, BorrowedModel)
    return Pair(model, reference, family)


def test_a_picture_between_words_is_answered_as_by_transformers(pair: Pair) -> None:
    before, picture, behind = torch.arange(3, 9), torch.tensor(pair.family.token_ids), torch.arange(30, 51)
    with torch.inference_mode():
        prompt = torch.cat((before, picture, behind))
        given = pair.family.draw(0) | pair.family.tell(prompt)
        expected = pair.reference(input_ids=prompt[None], use_cache=False, **given).logits[0]
        words = pair.model.embed_tokens(prompt)
    seen = torch.cat((words[: len(before)], pair.encode(0), words[-len(behind) :]))
    shown = pair.family.place(len(before)), pair.family.find_embeddings(len(before))
    assert_close(by_pages.at_once(pair.model, seen, *shown), expected)
    # Pictures that are seen whole are never computed in parts.
    cuts = (len(before), 20) if pair.model.shape.sees_pictures_whole else (10, 20)
    assert_close(by_pages.in_parts(pair.model, seen, cuts, words, *shown), expected)
    assert (by_pages.at_once(pair.model, words) - expected).abs().max() > 0.1, "the picture makes no difference"


def test_tokens_that_are_none_of_the_picture_s_embeddings_are_the_model_s_own(pair: Pair) -> None:
    picture = torch.tensor(pair.family.token_ids)
    embeddings, marks = pair.encode(0), picture != IMAGE
    with torch.inference_mode():
        assert torch.equal(embeddings[marks], pair.model.embed_tokens(picture[marks]))


def test_another_picture_in_the_same_place_is_another(pair: Pair) -> None:
    assert (pair.encode(0) - pair.encode(1)).abs().max() > 0.1


def test_a_picture_laid_out_otherwise_than_it_is_encoded_fails_with_the_numbers(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"layout does not match its encoding: 3 tokens stand for .*\[\d+, 64\]"):
        pair.encode(0, [IMAGE] * 3)


def test_pictures_that_are_more_to_the_modules_than_their_embeddings_are_found_by_the_first(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llava.modeling_llava import LlavaModel

    reference = LLAVA.make_checkpoint(tmp_path)
    model = load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    compute = LlavaModel.forward

    def compute_with_more(self: Any, *args: Any, pixel_values: Tensor | None = None, **options: Any) -> Any:
        output = compute(self, *args, pixel_values=pixel_values, **options)
        if pixel_values is not None:
            output.last_hidden_state = output.last_hidden_state + 1
        return output

    monkeypatch.setattr(LlavaModel, "forward", compute_with_more)
    for seed in range(2):
        with pytest.raises(ValueError, match=r"pictures cannot be served: .* \d+\.\d% differently"):
            Pair(model, reference, LLAVA).encode(seed)


def test_pictures_that_the_modules_make_no_embeddings_of_fail_with_the_reason(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Granite Vision 4, which adds them to the states of several layers."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    from transformers.models.llava.modeling_llava import LlavaModel

    reference, model = LLAVA.make_checkpoint(tmp_path), load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    monkeypatch.setattr(LlavaModel, "get_image_features", lambda *_, **__: BaseModelOutputWithPooling())
    with pytest.raises(ValueError, match="pictures cannot be served: its layers need more than their embeddings"):
        Pair(model, reference, LLAVA).encode(0)


def test_a_tower_that_computes_with_a_whole_table_sees_all_of_it(tmp_path: Any) -> None:
    """GLM-4V's interpolates positions; in bfloat16, as published checkpoints are, tables of decoders are packed."""
    reference = GLM4V.make_checkpoint(tmp_path)
    for parameter in reference.parameters():
        parameter.data = parameter.data.bfloat16().float()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    with torch.inference_mode():
        expected = reference.model.get_image_features(**GLM4V.draw(0)).pooler_output
    assert_close(Pair(model, reference, GLM4V).encode(0), torch.cat(expected))


def test_layers_with_a_window_see_a_picture_whole_if_its_family_says_so(tmp_path: Any) -> None:
    GEMMA4_LARGE.make_checkpoint(tmp_path)
    model = load_model(tmp_path, PLACE)
    assert isinstance(model, BorrowedModel)
    assert [rule.is_causal for rule in model.rules.values()] == [False, False, True, False, True]
    assert model.shape.sees_pictures_whole


@pytest.mark.parametrize("family", [GEMMA4, GEMMA4_LARGE, LLAVA], ids=name_family)
def test_tokens_of_media_in_a_text_are_computed_as_transformers_computes_them(family: Family, tmp_path: Any) -> None:
    """Gemma 4's modules look up padding in place of them."""
    reference, model = family.make_checkpoint(tmp_path), load_model(tmp_path, PLACE)
    prompt = torch.tensor([3, 4, 296, 5, 295, 6, IMAGE, 7])
    with torch.inference_mode():
        expected = reference(input_ids=prompt[None], use_cache=False).logits[0]
        rows = model.embed_tokens(prompt)
    assert_close(by_pages.at_once(model, rows), expected)
