"""Requests for a model that shows pictures at sizes that depend on their own: items, names and refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from keepsight.config import Config
from keepsight.errors import (
    InvalidArgumentError,
    PictureEmbedsError,
    PromptTooLongError,
    ReservedTokenError,
    UnknownMediaError,
    UnsupportedPictureError,
)
from keepsight.frontend.pixels import make_pixels
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.frontend.prompt.read_messages import PicturePart, read_messages
from keepsight.media import TOKENS_PER_STRIP, Geometry, MediaItem
from keepsight.sampling_params import SamplingParams
from tests.drawn import ask, by_object, by_url, draw
from tests.frontend.qwen_like import IMAGE, VIDEO, build_qwen_like_checkpoint

PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen-like")
    build_qwen_like_checkpoint(directory)
    return directory


@pytest.fixture
def preparer(checkpoint: Path) -> Iterator[RequestPreparer]:
    made = RequestPreparer.from_config(Config(model=str(checkpoint), enable_prompt_embeds=True, enable_mm_embeds=True))
    yield made
    made.close()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return draw(seed).picture.resize((width, height))


def items_of(preparer: RequestPreparer, *pictures: Image.Image, **options: Any) -> tuple[MediaItem, ...]:
    return preparer.prepare_chat(ask(*map(by_object, pictures), "What?"), PARAMS, options).engine_request.media


def shapes_of(prepared: PreparedRequest) -> list[tuple[int, ...]]:
    hashes = [item.media_hash for item in prepared.engine_request.media]
    pixels = prepared.pixels_of(hashes)
    return [pixels[media_hash].shape for media_hash in hashes]


def test_every_picture_has_its_own_number_of_tokens_its_columns_and_pixels_of_its_own_size(
    preparer: RequestPreparer,
) -> None:
    sizes = [(640, 300), (300, 860), (1, 1), (200, 1)]
    prepared = preparer.prepare_chat(ask(*(by_url(picture(*size)) for size in sizes), "What?"), PARAMS)
    request = prepared.engine_request
    assert [item.geometry for item in request.media] == [Geometry(*size) for size in sizes]
    grids = [(item.span.length // item.columns, item.columns) for item in request.media]
    assert grids == [(9, 20), (27, 9), (8, 8), (1, 114)]
    assert shapes_of(prepared) == [(32 * rows, 32 * columns, 3) for rows, columns in grids]
    soft = preparer.tokenizer.token_id(IMAGE)
    places = [place for place, token_id in enumerate(request.token_ids) if token_id == soft]
    assert places == [place for item in request.media for place in range(item.span.start, item.span.end)]


def test_a_picture_sent_by_uuid_alone_has_the_same_layout(preparer: RequestPreparer) -> None:
    part = by_url(picture(640, 300)) | {"uuid": "mine"}
    [sent] = preparer.prepare_chat(ask(part, "What?"), PARAMS).engine_request.media
    for options in ({}, {"max_pixels": 70_000}):
        named = {"type": "image_url", "image_url": None, "uuid": "mine"}
        request = preparer.prepare_chat(ask(named, "What?"), PARAMS, options).engine_request
        assert (request.media == (sent,)) == (not options)
        assert request.media[0].span.length == (60 if options else 180)
        assert request.unsent_media == (request.media[0].media_hash,)


def test_a_recognized_picture_has_the_same_layout(preparer: RequestPreparer) -> None:
    conversation = read_messages(ask(by_url(picture(640, 300)), "What?"))
    sent = preparer.prepare_chat(conversation, PARAMS).engine_request
    recognized = preparer.recognize(conversation, None)
    assert recognized is not None
    assert preparer.prepare_chat(recognized, PARAMS).engine_request.media == sent.media


def test_a_picture_shown_at_the_same_size_has_one_hash_whatever_its_limits(preparer: RequestPreparer) -> None:
    drawn = picture(640, 300)
    [whole], [same], [smaller] = (
        items_of(preparer, drawn, **options) for options in ({}, {"max_pixels": 1_000_000}, {"max_pixels": 100_000})
    )
    assert whole == same
    assert smaller.span.length < whole.span.length
    assert smaller.media_hash != whole.media_hash
    [nearest] = items_of(preparer, drawn, resample=0)
    assert nearest.media_hash != whole.media_hash


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (4001, 20)])
def test_a_picture_that_is_too_elongated_is_refused_by_its_header(
    preparer: RequestPreparer, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_pixels, "decode_picture", None)
    part = by_url(picture(*size)) | {"uuid": "long"}
    with pytest.raises(UnsupportedPictureError, match=rf"{size[0]} x {size[1]} pixels: .* 200 times") as caught:
        preparer.prepare_chat(ask(part), PARAMS)
    assert (caught.value.field, caught.value.status) == ("messages[0].content[0].image_url.url", 400)
    with pytest.raises(UnknownMediaError):
        preparer.prepare_chat(ask({"type": "image_url", "image_url": None, "uuid": "long"}), PARAMS)
    with pytest.raises(UnsupportedPictureError):
        preparer.name_media(PicturePart(picture(*size), "file"), None)


def test_pictures_with_too_many_tokens_are_refused_with_their_number(preparer: RequestPreparer) -> None:
    large = by_object(Image.new("L", (4096, 4096)))
    with pytest.raises(PromptTooLongError, match="has 49152 tokens of 3 pictures alone: "):
        preparer.prepare_chat(ask(large, large, large), PARAMS)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_pixels": 16_777_217}, "max_pixels"),
        ({"size": {"longest_edge": 16_777_217}}, "size"),
        ({"min_pixels": 16_777_216}, "min_pixels"),
        ({"max_pixels": 5}, "max_pixels"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({"image_mean": 0.5}, "image_mean"),
    ],
)
def test_options_of_a_request_are_refused_under_their_own_names(
    preparer: RequestPreparer, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        preparer.prepare_chat(ask("Hello"), PARAMS, options)
    assert caught.value.field == f"mm_processor_kwargs.{field}"


def test_the_operator_s_size_limit_applies_to_requests(checkpoint: Path) -> None:
    config = Config(model=str(checkpoint), mm_processor_kwargs={"max_pixels": 100_000})
    preparer = RequestPreparer.from_config(config)
    [item] = items_of(preparer, picture(640, 300))
    assert item.span.length <= 100_000 // 32**2
    with pytest.raises(InvalidArgumentError, match="must be at most 100000 here"):
        items_of(preparer, max_pixels=100_001)


def test_embeddings_in_place_of_a_picture_are_refused_with_the_reason(preparer: RequestPreparer) -> None:
    part = PicturePart(np.zeros((64, 128), np.float32), "a picture", modality="image_embeds")
    with pytest.raises(PictureEmbedsError, match=r"a picture: are not supported by this model: .* rows and columns"):
        preparer.name_media(part, None)


def test_all_strips_of_an_embedded_prompt_but_the_last_have_equal_lengths(preparer: RequestPreparer) -> None:
    [prepared] = preparer.prepare_embeds({"prompt": np.zeros((150, 128), np.float32)}, PARAMS)
    media = prepared.engine_request.media
    assert [item.span.length for item in media] == [TOKENS_PER_STRIP, TOKENS_PER_STRIP, 150 - 2 * TOKENS_PER_STRIP]
    assert {item.columns for item in media} == {0}


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_token_ids_that_stand_for_pictures_are_refused(preparer: RequestPreparer, token: str) -> None:
    token_id = preparer.tokenizer.token_id(token)
    assert token_id is not None
    with pytest.raises(ReservedTokenError, match=f"must not contain {token_id}"):
        preparer.prepare_tokens([5, token_id], PARAMS)
