"""A request for a borrowed model: its tokens and arrays are those of transformers' processor; what is refused."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from keepsight.config import Config
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.pixels import carried_arrays
from keepsight.sampling_params import SamplingParams
from tests.drawn import ask, by_object, by_url
from tests.frontend.borrowed_like import FAMILIES, Family, load_reference, write_borrowed_checkpoint

PARAMS = SamplingParams()
TEXT_ARRAYS = {"input_ids", "attention_mask", "token_type_ids"}
SIZES = [(60, 40), (1, 1), (3, 50), (50, 3), (410, 50), (37, 911), (3000, 40), (300, 300)]


class Borrowed(NamedTuple):
    family: Family
    preparer: RequestPreparer
    reference: Any


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.model_type)
def borrowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Borrowed]:
    family: Family = request.param
    directory = tmp_path_factory.mktemp(family.model_type)
    write_borrowed_checkpoint(directory, family)
    preparer = RequestPreparer.from_config(Config(model=directory))
    yield Borrowed(family, preparer, load_reference(directory, family))
    preparer.close()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def render(preparer: RequestPreparer, messages: list[dict[str, Any]]) -> str:
    from keepsight.frontend.prompt.read_messages import read_messages

    return preparer.template.render(read_messages(messages))


def test_a_prompt_of_several_pictures_has_the_ids_of_the_reference(borrowed: Borrowed) -> None:
    family, preparer, reference = borrowed
    pictures = [noise(*size) for size in SIZES]
    parts = [part for each in pictures for part in (by_url(each), "and \n")]
    messages = [*ask("First: ", *parts, "What do you see?"), {"role": "assistant", "content": "A dog."}, *ask("Why?")]
    prepared = preparer.prepare_chat(messages, PARAMS).engine_request
    text = render(preparer, messages)
    assert text.count(family.image_token) == len(pictures)
    has_bos = bool(preparer.tokenizer.special_tokens.get("bos_token")) and not preparer.tokenizer.lacks_bos(text)
    expected = reference(text=[text], images=pictures, add_special_tokens=not has_bos, return_tensors="np")
    assert list(prepared.token_ids) == expected["input_ids"][0].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_the_arrays_of_a_picture_are_those_of_the_reference(borrowed: Borrowed, size: tuple[int, int]) -> None:
    family, preparer, reference = borrowed
    picture = noise(*size)
    prepared = preparer.prepare_chat(ask(by_object(picture), "What?"), PARAMS)
    [item] = prepared.engine_request.media
    made = carried_arrays(prepared.pixels_of([item.media_hash])[item.media_hash])
    token_ids = tuple(made.pop("token_ids").tolist())
    assert token_ids == prepared.engine_request.token_ids[item.span.start : item.span.end]
    expected = reference(text=[family.image_token], images=[picture], return_tensors="np")
    assert made.keys() == expected.keys() - TEXT_ARRAYS
    for name, array in made.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])
