"""Embeddings in place of a picture, end to end: same answers and same caches as for pictures, but separate entries."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from keepsight import LLM, SamplingParams
from keepsight.config import Config
from keepsight.errors import (
    InvalidArgumentError,
    MediaTooLargeError,
    PictureEmbedsError,
    TooManyPicturesError,
    UnknownMediaError,
    UnreadablePictureError,
    UnsupportedFieldError,
)
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prompt.read_messages import read_messages
from keepsight.outputs import RequestOutput
from keepsight.runner import model_runner
from keepsight.runner.encode_media import encode_media
from tests.drawn import Drawn, ask, by_object, by_url, draw
from tests.place import placed
from tests.precomputed import Values, by_embeds, embed, to_npy, to_safetensors

GREEDY = SamplingParams(temperature=0, max_tokens=40)
AT = "messages[0].content[0].image_embeds"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**placed(enable_mm_embeds=True)) as llm:
        yield llm


@pytest.fixture(scope="module")
def drawings() -> list[Drawn]:
    return [draw(51), draw(52)]


@pytest.fixture(scope="module")
def embeds(drawings: list[Drawn]) -> list[Values]:
    return embed(*(each.picture for each in drawings))


class Work:
    """Counts inputs prepared for the engine and items that it encoded."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_made, self.num_encoded = 0, 0
        make = llm.engine._media_pool._make_pixels

        def count_made(*arguments: Any) -> Any:
            self.num_made += 1
            return make(*arguments)

        def count_encoded(*arguments: Any) -> Any:
            self.num_encoded += 1
            return encode_media(*arguments)

        monkeypatch.setattr(llm.engine._media_pool, "_make_pixels", count_made)
        monkeypatch.setattr(model_runner, "encode_media", count_encoded)

    def take(self) -> tuple[int, int]:
        taken = self.num_made, self.num_encoded
        self.num_made = self.num_encoded = 0
        return taken


@pytest.fixture
def work(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(llm, monkeypatch)


def chat(llm: LLM, *parts: Any, **options: Any) -> RequestOutput:
    [output] = llm.chat(ask(*parts), GREEDY, use_tqdm=False, **options)
    return output


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_embeddings_of_any_form_get_the_picture_s_answer(llm: LLM, drawings: list[Drawn], embeds: list[Values]) -> None:
    first, values = drawings[0], embeds[0]
    forms = [values, torch.from_numpy(values.copy()), to_npy(values), to_npy(values[np.newaxis])]
    forms.append(to_safetensors(("F32", list(values.shape), values.tobytes())))
    for question in first.questions[:3]:
        from_picture = chat(llm, by_object(first.picture), question.text)
        assert from_picture.outputs[0].text == question.answer
        for form in forms:
            from_embeds = chat(llm, by_embeds(form), question.text)
            assert (from_embeds.prompt_token_ids, tokens_of(from_embeds)) == (
                from_picture.prompt_token_ids,
                tokens_of(from_picture),
            )


def test_embeddings_among_pictures_keep_their_position(
    llm: LLM, drawings: list[Drawn], embeds: list[Values], work: Work
) -> None:
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()
    llm.reset_mm_cache()
    pictures = [by_object(each.picture) for each in drawings]
    both = [by_embeds(each) for each in embeds]
    expected = tokens_of(chat(llm, *pictures, "What do you see?"))
    assert expected != tokens_of(chat(llm, *reversed(pictures), "What do you see?"))
    assert tokens_of(chat(llm, both[0], pictures[1], "What do you see?")) == expected
    assert tokens_of(chat(llm, pictures[0], both[1], "What do you see?")) == expected
    assert tokens_of(chat(llm, *both, "What do you see?")) == expected
    # Embeddings get no crops: they represent the whole picture.
    wide = chat(llm, *both, "What do you see?", mm_processor_kwargs={"do_pan_and_scan": True})
    assert tokens_of(wide) == expected
    assert work.take()[0] == 4


def test_repeated_embeddings_are_found_and_not_sent_again(llm: LLM, embeds: list[Values], work: Work) -> None:
    part, again = by_embeds(to_npy(embeds[0] / 2)), by_embeds(torch.from_numpy(embeds[0] / 2))
    llm.reset_prefix_cache()
    first = chat(llm, part, "What is this?")
    assert (first.num_cached_tokens, work.take()) == (0, (1, 1))
    second = chat(llm, again, "What is this?")
    # All tokens but the last are found.
    assert (second.num_cached_tokens, work.take()) == (len(first.prompt_token_ids) - 1, (0, 0))
    llm.reset_prefix_cache()
    assert tokens_of(chat(llm, part, "What is this?")) == tokens_of(first)
    assert work.take() == (0, 0)
    llm.reset_prefix_cache()
    llm.reset_encoder_cache()
    assert tokens_of(chat(llm, part, "What is this?")) == tokens_of(first)
    assert work.take() == (0, 1)


def test_one_uuid_may_name_embeddings_and_a_picture_separately(
    llm: LLM, drawings: list[Drawn], embeds: list[Values], work: Work
) -> None:
    def ask_with_uuid(part: dict[str, Any]) -> list[int]:
        return tokens_of(chat(llm, part | {"uuid": "cat"}, "What is this?"))

    picture, embeddings = (by_object(drawings[0].picture), by_embeds(to_npy(embeds[1])))
    answers = ask_with_uuid(picture), ask_with_uuid(embeddings)
    assert answers[0] != answers[1]
    assert work.take() == (2, 2)
    left_out = {"type": "image_pil"}, {"type": "image_embeds", "image_embeds": None}
    assert (ask_with_uuid(left_out[0]), ask_with_uuid(left_out[1])) == answers
    assert work.take() == (0, 0)
    with pytest.raises(UnknownMediaError) as caught:
        chat(llm, {"type": "image_embeds", "uuid": "dog"}, "What is this?")
    assert caught.value.field == AT


@pytest.fixture(scope="module")
def preparer() -> Iterator[RequestPreparer]:
    preparer = RequestPreparer.from_config(Config(enable_mm_embeds=True, max_media_bytes=10**6))
    yield preparer
    preparer.close()


def hash_of(preparer: RequestPreparer, part: dict[str, Any], salt: str | None = None) -> str:
    prepared = preparer.prepare_chat(ask(part), GREEDY, cache_salt=salt)
    [item] = prepared.engine_request.media
    assert item.modality == part["type"].replace("_pil", "")
    return item.media_hash


def test_a_media_hash_depends_on_the_values_and_the_salt(preparer: RequestPreparer, embeds: list[Values]) -> None:
    values = embeds[0].astype(np.float16).astype(np.float32)
    other = values.copy()
    other[-1, -1] += 1
    forms = (values, to_npy(values.astype(np.float16)), np.asfortranarray(values))
    names = [hash_of(preparer, by_embeds(each)) for each in forms]
    assert len(set(names)) == 1
    named = by_embeds(values) | {"uuid": "x"}
    picture = by_object(np.zeros((8, 8, 3), np.uint8)) | {"uuid": "x"}
    parts = [by_embeds(values), by_embeds(other), named, picture]
    salts = (None, "a", "b")
    assert len({hash_of(preparer, part, salt) for part in parts for salt in salts}) == len(parts) * len(salts)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda good: to_npy(good)[:-1], PictureEmbedsError, "is followed by"),
        (lambda good: to_npy(good.astype(object)), PictureEmbedsError, "'|O' are not supported"),
        (lambda good: to_npy(good[:, 1:]), PictureEmbedsError, "have the shape"),
        (lambda good: to_npy(good[0]), PictureEmbedsError, "have the shape"),
        (lambda good: to_npy(good * np.nan), PictureEmbedsError, "hold a NaN"),
        (lambda good: b"\x80\x04}\x94.", PictureEmbedsError, "are not a .npy file"),
        (lambda _: "https://example.org/a.npy", UnreadablePictureError, "not base64"),
        (lambda _: "media://media_1", UnreadablePictureError, "not base64"),
        (lambda _: "http", PictureEmbedsError, "3 bytes that are not"),
        (lambda _: bytes(10**6 + 1), MediaTooLargeError, "1000000"),
        (lambda _: None, InvalidArgumentError, "base64 of a .npy"),
        (lambda _: {"a": 1}, InvalidArgumentError, "base64 of a .npy"),
    ],
)
def test_invalid_embeddings_are_refused_at_their_field(
    preparer: RequestPreparer, embeds: list[Values], make: Any, error: type[InvalidArgumentError], message: str
) -> None:
    with pytest.raises(error, match=message.replace("|", r"\|")) as caught:
        preparer.prepare_chat(ask(by_embeds(make(embeds[0])), "What?"), GREEDY)
    assert (caught.value.field, caught.value.status // 100) == (AT, 4)


def test_embeddings_are_never_downloaded(preparer: RequestPreparer) -> None:
    for source in ("http", "https://example.org/a.npy", "media://media_1", "file:///etc/hostname"):
        conversation = read_messages(ask(by_embeds(source), "What?"))
        assert preparer.pictures_to_download(conversation) == []
        assert preparer.intake.find_handles(conversation.pictures) == []


def test_embeddings_are_accepted_only_if_enabled_and_count_as_pictures(embeds: list[Values]) -> None:
    part = by_embeds(to_npy(embeds[0]))
    preparer = RequestPreparer.from_config(Config())
    conversation = read_messages(ask(part, "What?"))
    for refuse in (preparer.pictures_to_download, lambda messages: preparer.prepare_chat(messages, GREEDY)):
        with pytest.raises(UnsupportedFieldError, match=r"--enable-mm-embeds .*enable_mm_embeds=True") as caught:
            refuse(conversation)
        assert caught.value.field == AT
    preparer = RequestPreparer.from_config(Config(enable_mm_embeds=True, limit_mm_per_prompt={"image": 1}))
    with pytest.raises(TooManyPicturesError):
        preparer.prepare_chat(ask(part, by_url(draw(1).picture)), GREEDY)


def test_the_largest_accepted_values_give_finite_logprobs(llm: LLM, embeds: list[Values]) -> None:
    largest = np.where(embeds[0] > 0, np.float32(1e18), np.float32(-1e18))
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True)
    [output] = llm.chat(ask(by_embeds(largest), "What?"), params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    shown = [each.logprob for token in output.outputs[0].logprobs for each in token.values()]
    assert shown
    assert np.isfinite(shown).all()
