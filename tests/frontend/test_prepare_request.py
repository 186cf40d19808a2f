"""All frontend work on a request, and above all its order: geometry first, pixels last."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from keepsight.config import HASHER_ALGORITHMS, Config
from keepsight.demo import checkpoint_path
from keepsight.errors import (
    CheckpointError,
    InvalidArgumentError,
    MediaWorkersLostError,
    PictureCountError,
    PromptTooLongError,
    UnreadablePictureError,
)
from keepsight.frontend import prepare_request
from keepsight.frontend.identity import identify_picture
from keepsight.frontend.intake.open_picture import PictureSource
from keepsight.frontend.pixels import make_pixels
from keepsight.frontend.pixels.decode_picture import decode_picture
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.tokenizer import Tokenizer
from keepsight.media import Geometry
from keepsight.requests import EngineRequest, Pixels
from keepsight.sampling_params import SamplingParams
from tests.byte_level_tokenizer import byte_level_checkpoint
from tests.clock import Clock
from tests.drawn import ask, by_object, by_url, draw, to_data_url, to_png
from tests.frontend.gemma_like import build_checkpoint_with_hole
from tests.frontend.sample_documents import Page, write_pdf
from tests.frontend.sample_pictures import encode

PARAMS = SamplingParams()
SOFT_TOKEN_ID = 909
VOCAB_SIZE = 960  # the demo model's: more than its tokenizer has
CROPPED = {"do_pan_and_scan": True}


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fields of the pictures that were decoded, in order."""
    fields: list[str] = []

    def note(source: Any, field: str, max_pixels: int) -> Any:
        fields.append(field)
        return decode_picture(source, field, max_pixels)

    monkeypatch.setattr(make_pixels, "decode_picture", note)
    return fields


def hashes_of(prepared: PreparedRequest) -> list[str]:
    return [item.media_hash for item in prepared.engine_request.media]


def soft_positions(request: EngineRequest) -> list[int]:
    return [position for position, token_id in enumerate(request.token_ids) if token_id == SOFT_TOKEN_ID]


def covered_positions(request: EngineRequest) -> Iterator[int]:
    for item in request.media:
        yield from range(item.span.start, item.span.end)


@pytest.mark.parametrize("overrides", [None, CROPPED])
def test_every_picture_and_crop_has_its_span_its_geometry_and_its_pixels(
    preparer: RequestPreparer, overrides: dict[str, Any] | None
) -> None:
    pictures = [draw(seed).picture.resize(size) for seed, size in enumerate([(640, 300), (300, 860), (300, 300)])]
    prepared = preparer.prepare_chat(ask(*map(by_url, pictures), "What?"), PARAMS, overrides)
    request, pixels = prepared.engine_request, prepared.pixels_of(hashes_of(prepared))
    assert list(covered_positions(request)) == soft_positions(request)
    assert {(each.shape, each.dtype.name) for each in pixels.values()} == {((112, 112, 3), "uint8")}
    whole = [Geometry(640, 300), Geometry(300, 860), Geometry(300, 300)]
    crops = [[Geometry(320, 300)] * 2, [Geometry(300, 287)] * 2 + [Geometry(300, 286)], []]
    expected = [
        geometry
        for picture, parts in zip(whole, crops, strict=True)
        for geometry in (picture, *(parts if overrides else []))
    ]
    assert [item.geometry for item in request.media] == expected
    assert len(pixels) == len(expected)


def test_pixels_follow_their_pictures(preparer: RequestPreparer) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    pictures = [Image.new("RGB", (50, 40), colour) for colour in colours]
    prepared = preparer.prepare_chat(ask(*map(by_object, pictures), "What?"), PARAMS)
    hashes = hashes_of(prepared)
    pixels = prepared.pixels_of(hashes)
    assert [tuple(map(int, pixels[each][5, 5])) for each in hashes] == colours


def test_a_chat_begins_with_one_bos_and_so_does_a_plain_prompt(preparer: RequestPreparer) -> None:
    chatted = preparer.prepare_chat(ask("Hello"), PARAMS).engine_request
    written = "<start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n"
    for prompt in (written, f"<bos>{written}"):
        assert preparer.prepare_text(prompt, {}, PARAMS).engine_request.token_ids == chatted.token_ids
    assert chatted.token_ids.count(2) == 1


# Early refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_a_list_of_more_tokens_than_the_vocabulary_has_is_refused_by_name(preparer: RequestPreparer, name: str) -> None:
    tokens = [5] * VOCAB_SIZE
    fitting: dict[str, Any] = {name: tokens}
    assert preparer.prepare_text("Hello", {}, SamplingParams(**fitting))
    longer: dict[str, Any] = {name: [*tokens, 5]}
    with pytest.raises(InvalidArgumentError, match=f"{name}: must hold at most"):
        preparer.prepare_text("Hello", {}, SamplingParams(**longer))


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused_by_its_index(preparer: RequestPreparer, name: str) -> None:
    anothers: dict[str, Any] = {name: [5, 151_645]}
    with pytest.raises(InvalidArgumentError, match=rf"^{name}\[1\]: 151645 is not one of this model's"):
        preparer.prepare_text("Hello", {}, SamplingParams(**anothers))


def test_ids_of_the_model_without_a_token_can_be_sent(preparer: RequestPreparer) -> None:
    last = VOCAB_SIZE - 1
    assert preparer.tokenizer.token(last) is None
    params = SamplingParams(logit_bias={last: 1.0}, allowed_token_ids=[last], stop_token_ids=[last])
    assert preparer.prepare_tokens([2, last], params).engine_request.token_ids == (2, last)
    with pytest.raises(InvalidArgumentError, match=r"prompt_token_ids: 960 is not one of this model's 960 tokens"):
        preparer.prepare_tokens([2, VOCAB_SIZE], PARAMS)


def test_tokens_after_a_hole_in_the_vocabulary_are_like_any_other(tmp_path: Path) -> None:
    build_checkpoint_with_hole(tmp_path)
    preparer = RequestPreparer.from_config(Config(model=str(tmp_path)))
    request = preparer.prepare_chat(ask(by_url(draw(1).picture), "What?"), PARAMS).engine_request
    assert max(request.token_ids) >= preparer.tokenizer.num_tokens


def test_bad_words_are_banned_both_at_a_start_and_after_a_space(preparer: RequestPreparer) -> None:
    params = SamplingParams(bad_words=["red", " ", " dark blue"])
    request = preparer.prepare_text("a", {}, params).engine_request
    spelled = ["red", " red", " ", "dark blue", " dark blue"]
    assert set(request.banned_runs) == {preparer.tokenizer.encode(each) for each in spelled}


def test_bad_words_may_be_spelled_by_tokens_that_include_the_space(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_checkpoint(byte_level_checkpoint())
    monkeypatch.setattr(preparer, "tokenizer", tokenizer)
    request = preparer.prepare_text("a", {}, SamplingParams(bad_words=["see", "東京"])).engine_request
    assert {b"".join(map(tokenizer.token_bytes, run)).decode() for run in request.banned_runs} == {
        "see", " see", "東京", " 東京",
    }  # fmt: skip
    assert set(request.banned_runs) >= {tokenizer.encode(each) for each in ("see", " see")}


def test_banned_white_space_does_not_ban_the_space(preparer: RequestPreparer) -> None:
    params = SamplingParams(bad_words=["\n", " \n\n", "\tred", "  "])
    request = preparer.prepare_text("a", {}, params).engine_request
    assert set(request.banned_runs) == {preparer.tokenizer.encode(each) for each in ("\n", " \n\n", "\tred", "  ")}


def test_a_prediction_is_sent_as_tokens_that_the_model_can_generate(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(prediction="a red circle", max_tokens=5)
    request = preparer.prepare_text("a", {}, params).engine_request
    spelled = preparer.tokenizer.encode("a red circle")
    assert request.predicted == spelled
    assert request.sampling_params == SamplingParams(max_tokens=5)
    monkeypatch.setattr(preparer._limits, "vocab_size", max(spelled))
    assert preparer.prepare_text("a", {}, params).engine_request.predicted == spelled[: spelled.index(max(spelled))]
    for nothing in (None, ""):
        assert not preparer.prepare_text("a", {}, SamplingParams(prediction=nothing)).engine_request.predicted


def test_a_prediction_is_cut_to_the_length_of_the_answer() -> None:
    preparer = RequestPreparer.from_config(Config(max_model_len=50))
    request = preparer.prepare_text("a", {}, SamplingParams(prediction="a red circle " * 30)).engine_request
    assert len(request.predicted) == 50
    with pytest.raises(InvalidArgumentError, match=r"^prediction: has 130000 characters, far more than the 50 tokens"):
        preparer.prepare_text("a", {}, SamplingParams(prediction="a red circle " * 10_000))


def test_a_prompt_that_is_too_long_is_refused_before_any_content_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    preparer = RequestPreparer.from_config(Config(max_model_len=50))
    hashed: list[PictureSource] = []

    def note(source: PictureSource, _algorithm: str) -> str:
        hashed.append(source)
        return "a hash"

    monkeypatch.setattr(identify_picture, "hash_content", note)
    picture = by_url(draw(7).picture)
    with pytest.raises(PromptTooLongError, match=r"of them of 2 pictures: .* context length is 50 ") as caught:
        preparer.prepare_chat(ask(picture, picture, "What are these two, if you please?"), PARAMS)
    assert "32 of them" in str(caught.value)
    assert not hashed
    preparer.prepare_chat(ask(picture, "What?"), PARAMS)
    assert len(hashed) == 1


def test_crops_that_do_not_fit_are_refused_before_any_is_planned(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out: list[object] = []
    monkeypatch.setattr(identify_picture, "plan_crops", lambda *arguments: laid_out.append(arguments))
    monkeypatch.setattr(preparer.expander, "expand", lambda *arguments: laid_out.append(arguments))
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 1, "pan_and_scan_max_num_crops": 2**31 - 1}
    messages = ask({"type": "image", "image": Image.new("L", (4_000_000, 1))}, "What?")
    with pytest.raises(PromptTooLongError, match="has 64000016 tokens of 4000001 pictures alone: "):
        preparer.prepare_chat(messages, PARAMS, options)
    assert not laid_out


def test_a_prompt_may_be_one_token_shorter_than_the_context_and_no_longer(preparer: RequestPreparer) -> None:
    length = preparer.max_model_len
    assert len(preparer.prepare_tokens([30] * (length - 1), PARAMS).engine_request.token_ids) == length - 1
    with pytest.raises(PromptTooLongError, match=f"has {length} tokens"):
        preparer.prepare_tokens([30] * length, PARAMS)


def test_only_the_beginning_of_a_far_too_long_text_is_encoded(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, lengths = preparer.tokenizer.encode, list[int]()

    def note(text: str, **options: Any) -> tuple[int, ...]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(preparer.tokenizer, "encode", note)
    text = "one picture " * 100_000
    with pytest.raises(PromptTooLongError, match=r"has \d+ characters, .* context length is 2048 tokens"):
        preparer.prepare_chat([{"role": "user", "content": text}], PARAMS)
    assert sum(lengths) < 100_000


def test_an_unreadable_picture_is_refused_before_the_others_are_decoded(
    preparer: RequestPreparer, decoded: list[str]
) -> None:
    broken = {"type": "image_url", "image_url": {"url": to_data_url(b"no picture")}}
    with pytest.raises(UnreadablePictureError) as caught:
        preparer.prepare_chat(ask(by_url(draw(7).picture), broken), PARAMS)
    assert caught.value.field == "messages[0].content[1].image_url.url"
    assert not decoded


def test_markers_that_do_not_match_the_pictures_are_refused_before_anything_is_decoded(
    preparer: RequestPreparer, decoded: list[str]
) -> None:
    with pytest.raises(PictureCountError, match=r"1 <start_of_image> markers for 2 pictures"):
        preparer.prepare_text("<start_of_image>", {"image": [draw(1).picture] * 2}, PARAMS)
    assert not decoded


def test_a_picture_truncated_after_its_header_is_refused_when_decoded(preparer: RequestPreparer) -> None:
    png = to_png(draw(7).picture)
    prepared = preparer.prepare_text("<start_of_image>", {"image": [png[: len(png) // 2]]}, PARAMS)
    with pytest.raises(UnreadablePictureError, match="damaged or truncated") as caught:
        prepared.pixels_of(hashes_of(prepared))
    assert caught.value.field == "multi_modal_data.image[0]"


def test_a_file_that_pillow_opened_and_cannot_load_is_refused_by_its_field(preparer: RequestPreparer) -> None:
    png = to_png(draw(7).picture)
    opened = Image.open(io.BytesIO(png[: len(png) // 2]))
    with pytest.raises(UnreadablePictureError, match="damaged or truncated") as caught:
        preparer.prepare_text("<start_of_image>", {"image": [opened]}, PARAMS)
    assert caught.value.field == "multi_modal_data.image[0]"


def test_a_closed_image_is_refused_with_advice(preparer: RequestPreparer, tmp_path: Path) -> None:
    draw(7).picture.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as left, Image.open(tmp_path / "a.png") as loaded:
        loaded.load()
    with (tmp_path / "a.png").open("rb") as file:
        opened = Image.open(file)
    for closed, reason in ((left, "AssertionError"), (opened, "seek of closed file")):
        with pytest.raises(UnreadablePictureError, match=rf"was closed \(ask within its `with`.*: {reason}$"):
            preparer.prepare_text("<start_of_image>", {"image": [closed]}, PARAMS)
    preparer.prepare_text("<start_of_image>", {"image": [loaded]}, PARAMS)


# Pixels on request --------------------------------------------------------------------------------------------


def test_only_requested_pictures_are_decoded(preparer: RequestPreparer, decoded: list[str]) -> None:
    pictures = [draw(seed).picture for seed in range(3)]
    prepared = preparer.prepare_chat(ask(*map(by_url, pictures), "What?"), PARAMS)
    assert not decoded
    second = hashes_of(prepared)[1]
    assert prepared.pixels_of({second}).keys() == {second}
    assert decoded == ["messages[0].content[1].image_url.url"]
    assert prepared.pixels_of(()) == {}


def test_a_picture_and_its_crops_are_decoded_once(preparer: RequestPreparer, decoded: list[str]) -> None:
    picture = by_url(draw(1).picture.resize((640, 300)))
    prepared = preparer.prepare_chat(ask(picture, picture, "What?"), PARAMS, CROPPED)
    whole, left, right, *again = hashes_of(prepared)
    assert again == [whole, left, right]
    assert prepared.group_by_picture({whole, left, right}) == [(whole, left, right)]
    pixels = prepared.pixels_of([whole, left, right])
    assert len(decoded) == 1
    [only_right] = prepared.pixels_of([right]).values()
    np.testing.assert_array_equal(only_right, pixels[right])
    assert not np.array_equal(pixels[left], pixels[right])


def test_a_crop_s_pixels_do_not_keep_the_whole_picture_in_memory(preparer: RequestPreparer) -> None:
    """A crop of exactly the model's size is not resized, so it could be a view of the whole picture."""
    options = CROPPED | {"pan_and_scan_min_crop_size": 50}
    photo = encode(Image.linear_gradient("L").resize((112, 224)).convert("RGB"), "JPEG")
    prepared = preparer.prepare_text("<start_of_image>", {"image": [photo]}, PARAMS, options)
    whole, upper, lower = hashes_of(prepared)
    assert len({whole, upper, lower}) == 3
    for pixels in prepared.pixels_of([whole, upper, lower]).values():
        while isinstance(pixels.base, np.ndarray):
            pixels = pixels.base
        assert pixels.nbytes <= 112 * 112 * 4


def test_an_error_of_a_shared_picture_names_the_request_s_own_field(preparer: RequestPreparer) -> None:
    prepared = preparer.prepare_chat(ask(by_url(draw(1).picture), by_url(draw(2).picture)), PARAMS)
    error = prepared.as_own(UnreadablePictureError("messages[7]", "is damaged"), hashes_of(prepared)[1])
    assert type(error) is UnreadablePictureError
    assert str(error) == "messages[0].content[1].image_url.url: is damaged"


@pytest.mark.parametrize(
    ("error", "expected"), [(MemoryError(), RuntimeError), (MediaWorkersLostError("none comes"), MediaWorkersLostError)]
)
def test_each_waiting_request_gets_its_own_error_object(
    preparer: RequestPreparer, error: Exception, expected: type[Exception]
) -> None:
    prepared = preparer.prepare_chat(ask(by_url(draw(1).picture)), PARAMS)
    own, another_s = (prepared.as_own(error, hashes_of(prepared)[0]) for _ in range(2))
    assert own is not another_s
    assert own is not error
    assert type(own) is type(another_s) is expected
    assert own.__cause__ in (None, error)


# Names of media -----------------------------------------------------------------------------------------------


def test_a_picture_has_one_hash_wherever_and_however_often_it_is_sent(preparer: RequestPreparer) -> None:
    picture, other = by_url(draw(1).picture), by_url(draw(2).picture)
    first = hashes_of(preparer.prepare_chat(ask("What?", picture), PARAMS))
    second = hashes_of(preparer.prepare_chat(ask(other, picture, "And?", picture), SamplingParams(n=3)))
    assert first == [second[1]] == [second[2]]
    assert second[0] != second[1]


def test_a_cropped_picture_s_whole_has_the_hash_of_the_uncropped_picture(preparer: RequestPreparer) -> None:
    messages = ask(by_url(draw(1).picture.resize((640, 300))))
    [alone] = hashes_of(preparer.prepare_chat(messages, PARAMS))
    whole, left, right = hashes_of(preparer.prepare_chat(messages, PARAMS, CROPPED))
    assert whole == alone
    assert len({whole, left, right}) == 3


def test_changing_an_array_afterwards_has_no_effect(preparer: RequestPreparer) -> None:
    array = np.asarray(draw(3).picture).copy()
    for source in (array, torch.from_numpy(array.copy())):
        expected = preparer.prepare_chat(ask(by_object(source), "What?"), PARAMS)
        pixels = expected.pixels_of(hashes_of(expected))
        prepared = preparer.prepare_chat(ask(by_object(source), "What?"), PARAMS)
        source[:] = 0
        found = prepared.pixels_of(hashes_of(prepared))
        assert found.keys() == pixels.keys()
        assert all(np.array_equal(found[each], pixels[each]) for each in pixels)
        assert any(each.any() for each in found.values())
        later = preparer.prepare_chat(ask(by_object(source), "What?"), PARAMS)
        assert hashes_of(later) != hashes_of(expected)


def test_changing_a_pil_image_afterwards_has_no_effect(preparer: RequestPreparer) -> None:
    image = draw(3).picture.copy()
    expected = preparer.prepare_chat(ask(by_object(image.copy()), "What?"), PARAMS)
    prepared = preparer.prepare_chat(ask(by_object(image), "What?"), PARAMS)
    image.paste((0, 0, 0), (0, 0, *image.size))
    assert hashes_of(prepared) == hashes_of(expected)
    [pixels], [found] = (each.pixels_of(hashes_of(each)).values() for each in (expected, prepared))
    assert np.array_equal(found, pixels)


def test_a_picture_has_the_pixels_of_its_array(preparer: RequestPreparer) -> None:
    picture = draw(3).picture
    array = np.asarray(picture)
    made: list[Pixels] = []
    for source in (picture, array, np.moveaxis(array, -1, 0), torch.from_numpy(array.copy())):
        prepared = preparer.prepare_text("<start_of_image>", {"image": [source]}, PARAMS)
        made += prepared.pixels_of(hashes_of(prepared)).values()
    assert len(made) == 4
    assert all(np.array_equal(made[0], each) for each in made)


def test_the_hash_algorithm_is_set_by_option_or_else_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def name_under(option: str | None, variable: str) -> str:
        monkeypatch.setenv("KEEPSIGHT_MM_HASHER_ALGORITHM", variable)
        preparer = RequestPreparer.from_config(Config(mm_hasher_algorithm=option))
        return hashes_of(preparer.prepare_chat(ask(by_url(draw(1).picture)), PARAMS))[0]

    names = {each: name_under(each, "") for each in HASHER_ALGORITHMS}
    assert len(set(names.values())) == len(names)
    assert name_under(None, "") == names["blake3"]
    assert name_under(None, "sha256") == names["sha256"]
    assert name_under("sha512", "sha256") == names["sha512"]


def test_another_salt_backend_or_model_gives_another_hash(preparer: RequestPreparer, tmp_path: Path) -> None:
    for folder in ("moved", "other"):
        shutil.copytree(checkpoint_path(), tmp_path / folder, ignore=shutil.ignore_patterns("*.safetensors"))
    with (tmp_path / "other" / "config.json").open("a") as configuration:
        configuration.write("\n")
    moved = RequestPreparer.from_config(Config(model=tmp_path / "moved"))
    pil = RequestPreparer.from_config(Config(image_backend="pil"))
    other = RequestPreparer.from_config(Config(model=tmp_path / "other"))
    messages = ask(by_url(draw(1).picture))
    prepared = [
        *(each.prepare_chat(messages, PARAMS) for each in (preparer, pil, other)),
        *(preparer.prepare_chat(messages, PARAMS, cache_salt=salt) for salt in ("None", "a", "b")),
    ]
    assert len({hashes_of(each)[0] for each in prepared}) == len(prepared)
    # The checkpoint's path and the machine do not matter.
    assert hashes_of(moved.prepare_chat(messages, PARAMS)) == hashes_of(prepared[0])


def test_salt_and_priority_reach_the_engine_whatever_the_prompt(preparer: RequestPreparer) -> None:
    for prepared in (
        preparer.prepare_chat(ask("Hello"), PARAMS, cache_salt="mine", priority=4),
        preparer.prepare_text("Hello", {}, PARAMS, cache_salt="mine", priority=4),
        preparer.prepare_tokens([30], PARAMS, cache_salt="mine", priority=4),
    ):
        assert (prepared.engine_request.cache_salt, prepared.engine_request.priority) == ("mine", 4)


@pytest.mark.parametrize(
    ("terms", "field"),
    [
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": b"mine"}, "cache_salt"),
        ({"cache_salt": "x" * 65_537}, "cache_salt"),
        ({"priority": True}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": -(2**64)}, "priority"),
    ],
)
def test_a_salt_or_priority_of_the_wrong_kind_or_length_is_refused(
    preparer: RequestPreparer, terms: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        preparer.prepare_tokens([30], PARAMS, **terms)
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["\ud800", "\ud800" + "a" * 2**17])
def test_an_unpaired_surrogate_is_refused_by_field_name(preparer: RequestPreparer, text: str) -> None:
    ways: dict[str, Callable[[], object]] = {
        "messages": lambda: preparer.prepare_chat(ask(text), PARAMS),
        "prompt": lambda: preparer.prepare_text(text, {}, PARAMS),
        "bad_words": lambda: preparer.prepare_chat(ask("Hello"), SamplingParams(bad_words=[text[: 2**15]])),
        "prediction": lambda: preparer.prepare_chat(ask("Hello"), SamplingParams(prediction=text)),
    }
    for field, prepare in ways.items():
        with pytest.raises(InvalidArgumentError, match="cannot be encoded as UTF-8") as caught:
            prepare()
        assert caught.value.field == field


# Options and context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"do_resize": False}, "mm_processor_kwargs.do_resize"),
        ({"size": 5}, "mm_processor_kwargs.size"),
        ({"do_pan_and_scan": "yes"}, "mm_processor_kwargs.do_pan_and_scan"),
        ({"pan_and_scan_max_num_crops": 0}, "mm_processor_kwargs.pan_and_scan_max_num_crops"),
        ({"pan_and_scan_min_ratio_to_activate": -1}, "mm_processor_kwargs.pan_and_scan_min_ratio_to_activate"),
        ({5: 5}, "mm_processor_kwargs.5"),
        ([], "mm_processor_kwargs"),
    ],
)
def test_processor_options_are_checked_whether_or_not_there_are_pictures(
    preparer: RequestPreparer, overrides: Any, field: str
) -> None:
    for messages in (ask("Hello"), ask(by_object(draw(1).picture))):
        with pytest.raises(InvalidArgumentError) as caught:
            preparer.prepare_chat(messages, PARAMS, overrides)
        assert caught.value.field == field


# Isolation of requests ----------------------------------------------------------------------------------------


def test_requests_prepared_on_several_threads_are_as_if_prepared_alone(preparer: RequestPreparer) -> None:
    drawings = [draw(seed) for seed in range(12)]

    def prepare(index: int) -> PreparedRequest:
        drawn = drawings[index % 12]
        return preparer.prepare_chat(ask(by_url(drawn.picture), drawn.questions[0].text), PARAMS)

    alone = [prepare(index) for index in range(12)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(prepare, range(48)))
    for index, prepared in enumerate(together):
        request, expected = prepared.engine_request, alone[index % 12].engine_request
        assert (request.token_ids, request.media) == (expected.token_ids, expected.media)
    assert len({each.engine_request.request_id for each in alone + together}) == 60


def test_one_request_s_options_do_not_reach_the_next(preparer: RequestPreparer) -> None:
    messages = ask(by_object(Image.new("RGB", (640, 300))))
    prepared = [preparer.prepare_chat(messages, PARAMS, options) for options in (None, CROPPED, None, {})]
    counts = [len(hashes_of(each)) for each in prepared]
    assert counts == [1, 3, 1, 1]


# Checkpoints --------------------------------------------------------------------------------------------------


def test_the_context_length_is_the_checkpoint_s_or_shorter(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoint_path(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    path = directory / "config.json"
    values = json.loads(path.read_text())

    def max_model_len(positions: int | None, asked: int | None = None) -> int:
        values["text_config"]["max_position_embeddings"] = positions
        path.write_text(json.dumps(values))
        return RequestPreparer.from_config(Config(model=directory, max_model_len=asked)).max_model_len

    assert max_model_len(500) == 500
    assert max_model_len(500, 400) == 400
    assert max_model_len(None) == 131_072
    with pytest.raises(InvalidArgumentError, match="max_model_len: 501 exceeds the 500 positions"):
        max_model_len(500, 501)


def test_a_missing_folder_and_a_file_are_reported_as_such(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "nothing", "no such folder"),
        (checkpoint_path() / "config.json", "is a file, not a checkpoint folder"),
    ):
        with pytest.raises(CheckpointError, match=reason) as caught:
            RequestPreparer.from_config(Config(model=path))
        assert caught.value.path == path


def test_a_folder_that_is_no_checkpoint_is_named_even_if_it_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/config.json: is missing, so its folder is not a checkpoint"):
        RequestPreparer.from_config(Config(model="."))


def test_reading_a_document_and_rendering_the_prompt_count_as_identifying(
    preparer: RequestPreparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pypdfium2")
    clock = Clock()
    monkeypatch.setattr(prepare_request, "time", SimpleNamespace(monotonic=clock))

    def slow_down(part: object, name: str, seconds: float) -> None:
        honest = getattr(part, name)

        def work(*arguments: Any, **options: Any) -> Any:
            clock.now += seconds
            return honest(*arguments, **options)

        monkeypatch.setattr(part, name, work)

    slow_down(preparer.intake, "fetch_all", 1)
    slow_down(preparer._identifier, "pages_of", 10)
    slow_down(preparer.template, "render", 100)
    document = {"type": "file", "file": {"file_data": to_data_url(write_pdf(Page(), Page()), "application/pdf")}}
    account = preparer.prepare_chat(ask(document, "What?"), PARAMS).account
    assert [(span.stage, span.seconds) for span in account.spans] == [("fetch", 1), ("identify", 110)]
    assert account.began == Clock.now
