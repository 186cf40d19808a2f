"""Requests for a borrowed model: tokens and arrays equal those of transformers' processor; what is refused."""

import base64
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from keepsight.config import Config
from keepsight.errors import (
    CheckpointConfigError,
    InvalidArgumentError,
    PictureCountError,
    PictureEmbedsError,
    PromptEmbedsError,
    PromptTooLongError,
    ReservedTokenError,
    UnknownMediaError,
    UnsupportedFieldError,
    UnsupportedPictureError,
)
from keepsight.frontend.pixels import make_pixels
from keepsight.frontend.pixels.make_pixels import BorrowedLook, Look
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.read_messages import read_messages
from keepsight.media import Geometry
from keepsight.pixels import carried_arrays
from keepsight.sampling_params import SamplingParams
from tests.drawn import ask, by_object, by_url
from tests.frontend.borrowed_like import (
    FAMILIES,
    IDEFICS3,
    INTERNVL,
    LLAMA_TEMPLATE,
    LLAVA,
    NUMBERS,
    PIXTRAL,
    Family,
    load_reference,
    write_borrowed_checkpoint,
    write_tokenizer,
)
from tests.frontend.sample_documents import Page, write_pdf
from tests.llama_like_tokenizer import write_llama_like_tokenizer

PARAMS = SamplingParams()
TEXT_ARRAYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
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


def test_a_pdf_may_mention_the_marker_and_the_tokens_of_pictures(borrowed: Borrowed) -> None:
    family, preparer, _ = borrowed
    page = Page([f"The tag {family.image_token} and the token {family.soft_token or family.image_token} stand for it"])
    content = base64.b64encode(write_pdf(page)).decode()
    prepared = preparer.prepare_chat(ask({"type": "file", "file": {"file_data": content}}), PARAMS)
    assert len({item.media_hash for item in prepared.engine_request.media}) == 1
    assert prepared.text is not None
    assert f"The tag {family.image_token[0]} {family.image_token[1:]} and the token" in prepared.text


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def render(preparer: RequestPreparer, messages: list[dict[str, Any]]) -> str:
    return preparer.template.render(read_messages(messages))


def render_by_reference(reference: Any, family: Family, messages: list[dict[str, Any]]) -> str:
    """Render as users of transformers do: pictures as bare parts, text as parts if the template takes no strings."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            content = content if "is string" in family.template else [{"type": "text", "text": content}]
        else:
            content = [part if part["type"] == "text" else {"type": "image"} for part in content]
        shown.append({"role": message["role"], "content": content})
    text: str = reference.tokenizer.apply_chat_template(
        shown, chat_template=family.template, tokenize=False, add_generation_prompt=True
    )
    return text


def test_a_prompt_of_several_pictures_has_the_ids_of_the_reference(borrowed: Borrowed) -> None:
    family, preparer, reference = borrowed
    pictures = [noise(*size) for size in SIZES]
    parts = [part for each in pictures for part in (by_url(each), "and \n")]
    messages = [*ask("First: ", *parts, "What do you see?"), {"role": "assistant", "content": "A dog."}, *ask("Why?")]
    prepared = preparer.prepare_chat(messages, PARAMS).engine_request
    text = render(preparer, messages)
    assert text == render_by_reference(reference, family, messages)
    assert text.count(family.image_token) == len(pictures)
    has_bos = bool(preparer.tokenizer.special_tokens.get("bos_token")) and not preparer.tokenizer.lacks_bos(text)
    expected = reference(text=[text], images=pictures, add_special_tokens=not has_bos, return_tensors="np")
    assert list(prepared.token_ids) == expected["input_ids"][0].tolist()


def test_a_prompt_in_a_vocabulary_like_llama_s_has_the_ids_of_the_reference(tmp_path: Path) -> None:
    """As with LLaVA-1.5: a space before every text, also after a picture."""
    write_borrowed_checkpoint(tmp_path, LLAVA)
    ids = write_llama_like_tokenizer(tmp_path, ["<image>"])
    config = json.loads((tmp_path / "config.json").read_text()) | {"image_token_id": ids["<image>"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    preparer, reference = RequestPreparer.from_config(Config(model=tmp_path)), load_reference(tmp_path, LLAVA)
    messages = ask(by_url(noise(60, 40)), by_url(noise(30, 70)), "What do you see? ")
    expected = reference(text=[render(preparer, messages)], images=[noise(60, 40), noise(30, 70)])["input_ids"][0]
    assert list(preparer.prepare_chat(messages, PARAMS).engine_request.token_ids) == expected


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


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    write_borrowed_checkpoint(tmp_path / "llava", LLAVA)
    return tmp_path / "llava"


@pytest.fixture
def preparer(llava: Path) -> Iterator[RequestPreparer]:
    made = RequestPreparer.from_config(Config(model=llava, enable_mm_embeds=True, enable_prompt_embeds=True))
    yield made
    made.close()


class CountedLayouts:
    def __init__(self) -> None:
        self.asked: list[Geometry] = []

    def __call__(self, look: Look) -> object:
        assert isinstance(look, BorrowedLook)
        self.asked.append(look.geometry)
        return look.run()


def test_a_size_is_laid_out_once_and_known_pictures_use_that_layout(
    llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = CountedLayouts()
    preparer = RequestPreparer.from_config(Config(model=llava), run_look=layouts)
    asked_at_first = len(layouts.asked)
    monkeypatch.setattr(make_pixels, "decode_picture", None)
    conversation = read_messages(ask(by_url(noise(60, 41)), by_url(noise(60, 41, seed=1)), "What?"))
    assert preparer.recognize(conversation, None) is None
    sent = preparer.prepare_chat(conversation, PARAMS).engine_request
    recognized = preparer.recognize(conversation, None)
    assert recognized is not None
    assert preparer.prepare_chat(recognized, PARAMS).engine_request.media == sent.media
    assert layouts.asked[asked_at_first:] == [Geometry(60, 41)]


def test_a_picture_can_be_sent_by_its_uuid_alone(preparer: RequestPreparer) -> None:
    part = by_url(noise(60, 40)) | {"uuid": "mine"}
    [sent] = preparer.prepare_chat(ask(part, "What?"), PARAMS).engine_request.media
    named = {"type": "image_url", "image_url": None, "uuid": "mine"}
    assert preparer.prepare_chat(ask(named, "What?"), PARAMS).engine_request.media == (sent,)
    with pytest.raises(UnknownMediaError):
        preparer.prepare_chat(ask(named | {"uuid": "other"}, "What?"), PARAMS)


def test_the_hash_of_a_picture_covers_its_processor_but_not_the_checkpoint_s_path(llava: Path, tmp_path: Path) -> None:
    def name_in(directory: Path) -> str:
        preparer = RequestPreparer.from_config(Config(model=directory))
        [item] = preparer.prepare_chat(ask(by_url(noise(60, 40)), "What?"), PARAMS).engine_request.media
        preparer.close()
        return item.media_hash

    shutil.copytree(llava, tmp_path / "copy")
    assert name_in(tmp_path / "copy") == name_in(llava)
    config = json.loads((llava / "preprocessor_config.json").read_text()) | {"resample": 2}
    (llava / "preprocessor_config.json").write_text(json.dumps(config))
    assert name_in(tmp_path / "copy") != name_in(llava)


def test_a_picture_is_one_item_with_its_markers(tmp_path: Path) -> None:
    ids = write_borrowed_checkpoint(tmp_path / "a", PIXTRAL)
    preparer = RequestPreparer.from_config(Config(model=tmp_path / "a"))
    request = preparer.prepare_chat(ask("See ", by_url(noise(84, 56)), "What?"), PARAMS).engine_request
    [item] = request.media
    image, line_break, end = (ids[name] for name in ("[IMG]", "[IMG_BREAK]", "[IMG_END]"))
    row = [image] * 3
    assert list(request.token_ids[item.span.start : item.span.end]) == [*row, line_break, *row, end]


@pytest.mark.parametrize(
    ("family", "text"),
    [(PIXTRAL, "[IMG_BREAK]"), (INTERNVL, "<img>"), (IDEFICS3, "<row_1_col_2>"), (IDEFICS3, "<global-img>")],
)
def test_a_text_must_not_contain_a_picture_s_marker_or_tokens(tmp_path: Path, family: Family, text: str) -> None:
    write_borrowed_checkpoint(tmp_path / "a", family)
    preparer = RequestPreparer.from_config(Config(model=tmp_path / "a"))
    with pytest.raises(ReservedTokenError, match=re.escape(f"must not contain {text}")):
        preparer.prepare_chat(ask(f"Look: {text}"), PARAMS)
    with pytest.raises(PictureCountError, match=re.escape(f"1 {family.image_token} markers for 0 pictures")):
        preparer.prepare_chat(ask(f"Look: {family.image_token}"), PARAMS)


MP4, WAV = "data:video/mp4;base64,AAAA", {"data": "AAAA", "format": "wav"}
EMBEDS = {"type": "image_embeds", "image_embeds": np.zeros((4, 64), np.float32)}


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        ({"type": "video_url", "video_url": {"url": MP4}}, UnsupportedFieldError, "takes none; send its frames"),
        ({"type": "input_audio", "input_audio": WAV}, UnsupportedFieldError, "is a sound, but this model takes none"),
        (
            EMBEDS,
            PictureEmbedsError,
            "are not supported by this model: its pictures are encoded by transformers' modules",
        ),
    ],
)
def test_media_that_a_borrowed_model_does_not_take_are_refused_by_name(
    preparer: RequestPreparer, part: dict[str, Any], error: type[InvalidArgumentError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        preparer.prepare_chat(ask(part, "What?"), PARAMS)
    assert caught.value.field.startswith("messages[0].content[0]")


def test_embeddings_are_refused_without_advice_that_would_not_help(llava: Path) -> None:
    with (
        closing(RequestPreparer.from_config(Config(model=llava))) as preparer,
        pytest.raises(PictureEmbedsError, match=r"are not supported by this model: its pictures are encoded by"),
    ):
        preparer.prepare_chat(ask(EMBEDS, "What?"), PARAMS)


@pytest.mark.parametrize("option", [{"do_pan_and_scan": True}, {"size": {"shortest_edge": 14}}, {"fps": 2}])
def test_no_option_of_a_borrowed_processor_can_be_changed(
    preparer: RequestPreparer, llava: Path, option: dict[str, Any]
) -> None:
    message = rf"mm_processor_kwargs\.{next(iter(option))}: cannot be changed; these can: none"
    with pytest.raises(InvalidArgumentError, match=message):
        preparer.prepare_chat(ask(by_url(noise(60, 40)), "What?"), PARAMS, option)
    with pytest.raises(InvalidArgumentError, match=message):
        RequestPreparer.from_config(Config(model=llava, mm_processor_kwargs=option))


def test_a_picture_that_the_processor_rejects_is_refused_by_its_path(tmp_path: Path) -> None:
    write_borrowed_checkpoint(tmp_path / "a", PIXTRAL)
    preparer = RequestPreparer.from_config(Config(model=tmp_path / "a"))
    with pytest.raises(UnsupportedPictureError, match="takes no picture of 1 x 190 pixels") as caught:
        preparer.prepare_chat(ask("See ", by_url(noise(1, 190))), PARAMS)
    assert caught.value.field == "messages[0].content[1].image_url.url"


def test_pictures_that_do_not_fit_are_refused_without_laying_out_the_rest(llava: Path) -> None:
    layouts = CountedLayouts()
    preparer = RequestPreparer.from_config(Config(model=llava, max_model_len=40), run_look=layouts)
    asked_at_first = len(layouts.asked)
    with pytest.raises(PromptTooLongError, match="has 48 tokens of 3 pictures alone"):
        preparer.prepare_chat(ask(*(by_url(noise(60, height)) for height in range(50, 60))), PARAMS)
    assert layouts.asked[asked_at_first:] == [Geometry(60, height) for height in range(50, 53)]


def test_without_a_known_hidden_size_embedded_prompts_are_refused(tmp_path: Path) -> None:
    text = {name: value for name, value in NUMBERS.items() if name not in ("hidden_size", "num_attention_heads")}
    write_borrowed_checkpoint(tmp_path / "a", LLAVA, config={"text_config": text})
    preparer = RequestPreparer.from_config(Config(model=tmp_path / "a", enable_prompt_embeds=True))
    with pytest.raises(PromptEmbedsError, match=r"config\.json has no hidden_size"):
        preparer.prepare_embeds({"prompt_embeds": np.zeros((4, 64), np.float32)}, PARAMS)


@pytest.mark.parametrize(
    ("token_id", "message"),
    [
        (None, "image_token_id: is missing"),
        (300, "is not a plain special token"),
    ],
)
def test_a_checkpoint_without_a_picture_token_is_refused(tmp_path: Path, token_id: int | None, message: str) -> None:
    write_borrowed_checkpoint(tmp_path / "a", LLAVA, config={"image_token_id": token_id})
    with pytest.raises(CheckpointConfigError, match=message):
        RequestPreparer.from_config(Config(model=tmp_path / "a"))


def test_a_picture_token_that_the_processor_does_not_write_is_refused(llava: Path) -> None:
    ids = write_borrowed_checkpoint(llava, LLAVA)
    write_borrowed_checkpoint(llava, LLAVA, config={"image_token_id": ids["<s>"]})
    with pytest.raises(CheckpointConfigError, match="image_token_id: <s> is not what the processor writes for a pic"):
        RequestPreparer.from_config(Config(model=llava))


def test_a_processor_that_adds_tokens_of_its_own_is_refused(tmp_path: Path) -> None:
    """transformers' class adds tokens that its tokenizer lacks; the model has no such tokens."""
    special = [each for each in IDEFICS3.special if each != "<fake_token_around_image>"]
    ids = write_borrowed_checkpoint(tmp_path / "a", IDEFICS3._replace(special=special))
    message = rf"tokenizer\.json: the processor writes the tokens \[{max(ids.values()) + 1}\] for a picture"
    with pytest.raises(CheckpointConfigError, match=message):
        RequestPreparer.from_config(Config(model=tmp_path / "a"))


def test_a_text_only_model_of_another_family_uses_its_own_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], {"bos_token": "<s>"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | NUMBERS
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(LLAMA_TEMPLATE)
    preparer = RequestPreparer.from_config(Config(model=tmp_path))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is this?"}]
    judge: Any = AutoTokenizer.from_pretrained(tmp_path)
    expected = judge.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    for asked in (messages, parts):
        assert list(preparer.prepare_chat(asked, PARAMS).engine_request.token_ids) == expected
    with pytest.raises(PictureCountError, match="this model reads text only"):
        preparer.prepare_chat(ask(by_url(noise(60, 40)), "What?"), PARAMS)
