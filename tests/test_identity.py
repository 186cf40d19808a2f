"""Media names, end to end: a picture is processed once, in whatever form it is sent."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from PIL import Image

from keepsight import LLM, SamplingParams
from keepsight.errors import (
    InvalidArgumentError,
    MediaConflictError,
    UnknownMediaError,
    UnreadablePictureError,
    UnsupportedFieldError,
)
from keepsight.observe.metric_values import Counter, Histogram
from keepsight.outputs import RequestOutput
from tests.drawn import Drawn, ask, by_object, draw, to_data_url
from tests.frontend.sample_pictures import encode
from tests.place import placed

GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**placed()) as llm:
        yield llm


def ask_about(llm: LLM, part: dict[str, Any], drawn: Drawn) -> RequestOutput:
    [output] = llm.chat(ask(part, drawn.questions[0].text), GREEDY)
    assert output.outputs[0].text == drawn.questions[0].answer
    return output


def by_content(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": to_data_url(content)}}


def max_cached_tokens(output: RequestOutput) -> int:
    return len(output.prompt_token_ids) - 1


def test_another_encoding_of_a_known_picture_hits_its_cache_entries(llm: LLM) -> None:
    drawn = draw(41)
    forms = [encode(drawn.picture, "PNG"), encode(drawn.picture, "WEBP", lossless=True)]
    first, second = (ask_about(llm, by_content(form), drawn) for form in forms)
    assert first.num_cached_tokens == 0
    # The picture was recognized only after decoding.
    assert second.num_cached_tokens < max_cached_tokens(second)
    llm.reset_prefix_cache()
    assert ask_about(llm, by_content(forms[0]), drawn).num_cached_tokens == 0
    again = ask_about(llm, by_content(forms[1]), drawn)
    assert again.num_cached_tokens == max_cached_tokens(again)


def num_decoded(llm: LLM) -> float:
    metrics = [each for each in llm.get_metrics() if each.name == "keepsight_media_decoded_total"]
    [metric] = [each for each in metrics if each.labels["modality"] == "image"]
    assert isinstance(metric, Counter)
    return metric.value


def test_another_encoding_of_an_evicted_picture_is_decoded_once(llm: LLM) -> None:
    drawn = draw(45)
    forms = [encode(drawn.picture, "PNG"), encode(drawn.picture, "WEBP", lossless=True)]
    ask_about(llm, by_content(forms[0]), drawn)
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()
    llm.reset_mm_cache()
    # The frontend learns with an answer what the engine has dropped.
    ask_about(llm, by_content(encode(draw(46).picture, "PNG")), draw(46))
    before = num_decoded(llm)
    for form in (forms[1], forms[1], forms[0]):
        ask_about(llm, by_content(form), drawn)
    assert num_decoded(llm) == before + 1


def test_a_picture_sent_with_a_uuid_is_found_by_the_uuid_alone(llm: LLM) -> None:
    drawn = draw(42)
    sent = ask_about(llm, by_object(drawn.picture) | {"uuid": "cat"}, drawn)
    alone = ask_about(llm, {"type": "image_url", "image_url": None, "uuid": "cat"}, drawn)
    assert alone.num_cached_tokens == max_cached_tokens(alone)
    llm.reset_prefix_cache()
    # First the embeddings are still cached, then only the pixels.
    assert ask_about(llm, {"type": "image_url", "uuid": "cat"}, drawn).outputs[0].token_ids == sent.outputs[0].token_ids
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()
    ask_about(llm, {"type": "image_pil", "uuid": "cat"}, drawn)


def test_a_picture_named_by_its_uuid_alone_is_not_fetched(llm: LLM) -> None:
    drawn, nums = draw(47), [num_fetches(llm)]
    for content in (by_object(drawn.picture) | {"uuid": "read"}, {"type": "image_url", "uuid": "read"}):
        ask_about(llm, content, drawn)
        nums.append(num_fetches(llm))
    assert [after - before for before, after in pairwise(nums)] == [1, 0]


def num_fetches(llm: LLM) -> int:
    stages = [each for each in llm.get_metrics() if each.name == "keepsight_stage_seconds"]
    [fetches] = [each for each in stages if each.labels["stage"] == "fetch"]
    assert isinstance(fetches, Histogram)
    return fetches.count


def test_the_uuid_of_an_evicted_picture_is_unknown_until_the_picture_is_sent_again(llm: LLM) -> None:
    drawn = draw(43)
    ask_about(llm, by_object(drawn.picture) | {"uuid": "lost"}, drawn)
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()
    llm.reset_mm_cache()
    with pytest.raises(UnknownMediaError, match="'lost'") as caught:
        ask_about(llm, {"type": "image_url", "uuid": "lost"}, drawn)
    assert caught.value.field == "messages[0].content[0].image_url"
    ask_about(llm, by_object(drawn.picture) | {"uuid": "lost"}, drawn)
    ask_about(llm, {"type": "image_url", "uuid": "lost"}, drawn)


def test_a_uuid_whose_picture_cannot_be_made_is_free_for_one_of_another_size(llm: LLM) -> None:
    drawn = draw(42)
    content = encode(drawn.picture.resize((100, 60)), "PNG")
    with pytest.raises(UnreadablePictureError):
        ask_about(llm, by_content(content[: len(content) // 2]) | {"uuid": "half"}, drawn)
    ask_about(llm, by_object(drawn.picture) | {"uuid": "half"}, drawn)


def test_a_cached_picture_is_found_by_its_uuid_even_with_verify_hits() -> None:
    drawn = draw(9)
    with LLM(**placed(verify_hits=1, encoder_host_cache_gb=0)) as checking:
        sent = ask_about(checking, by_object(drawn.picture) | {"uuid": "cat"}, drawn)
        checking.reset_encoder_cache()
        checking.reset_prefix_cache()
        alone = ask_about(checking, {"type": "image_url", "uuid": "cat"}, drawn)
    assert alone.outputs[0].token_ids == sent.outputs[0].token_ids


def test_generate_takes_uuids_with_pictures_and_none_for_a_known_picture(llm: LLM) -> None:
    drawn = draw(44)
    text = f"<start_of_turn>user\n<start_of_image>{drawn.questions[0].text}<end_of_turn>\n<start_of_turn>model\n"

    def generate(pictures: Any, uuids: Any, **fields: Any) -> str:
        prompt = {"prompt": text, "multi_modal_data": {"image": pictures}, "multi_modal_uuids": {"image": uuids}}
        [output] = llm.generate(prompt | fields, GREEDY)
        return output.outputs[0].text

    answer = drawn.questions[0].answer
    assert generate([drawn.picture], ["dog"]) == generate([None], ["dog"]) == generate(None, "dog") == answer
    assert generate(drawn.picture, [None]) == generate([drawn.picture], None) == answer
    with pytest.raises(UnknownMediaError):
        generate([None], ["dog"], cache_salt="another tenant")
    with pytest.raises(MediaConflictError):
        generate([Image.new("RGB", (30, 40))], ["dog"])


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"multi_modal_uuids": ["a"]}, InvalidArgumentError, "multi_modal_uuids"),
        ({"multi_modal_uuids": {"smell": ["a"]}}, UnsupportedFieldError, "multi_modal_uuids.smell"),
        ({"multi_modal_uuids": {"image": ["a"]}}, InvalidArgumentError, "multi_modal_uuids.image"),
        ({"multi_modal_uuids": {"image": "a"}, "prompt_token_ids": [30]}, UnsupportedFieldError, "multi_modal_data"),
    ],
)
def test_uuids_that_belong_to_no_picture_are_refused(
    llm: LLM, fields: dict[str, Any], error: type[InvalidArgumentError], field: str
) -> None:
    with pytest.raises(error) as caught:
        llm.generate({"prompt": "Hello", **fields}, GREEDY)
    assert caught.value.field == field
