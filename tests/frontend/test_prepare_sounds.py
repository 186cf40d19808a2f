"""Requests for a model that takes sounds: tokens equal to the reference's, names by content, and refusals."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepsight.config import Config
from keepsight.errors import (
    InvalidArgumentError,
    MediaConflictError,
    PictureTooLargeError,
    ReservedTokenError,
    TooManyPicturesError,
    UnknownMediaError,
    UnreadablePictureError,
    UnsupportedFieldError,
    UnsupportedPictureError,
)
from keepsight.frontend.intake.sound_samples import Samples, SoundSource
from keepsight.frontend.pixels.make_pixels import Look
from keepsight.frontend.prepare_request import RequestPreparer
from keepsight.frontend.prepared_request import PreparedRequest
from keepsight.media import Geometry, Kind
from keepsight.pixels import carried_samples
from keepsight.sampling_params import SamplingParams
from tests.drawn import ask, by_url, draw
from tests.frontend.gemma_like import DEMO
from tests.frontend.sample_sounds import RATE, as_floats, drawn, sound, wav
from tests.frontend.sound_like import SOUND, build_sound_like_checkpoint, load_sound_processor

PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound-like")
    build_sound_like_checkpoint(directory)
    return directory


@pytest.fixture
def looked_at() -> list[SoundSource]:
    return []


@pytest.fixture
def preparer(checkpoint: Path, looked_at: list[SoundSource]) -> Iterator[RequestPreparer]:
    def run(look: Look) -> object:
        looked_at.append(look.source)
        return look.run()

    made = RequestPreparer.from_config(Config(model=str(checkpoint)), run_look=run)
    yield made
    made.close()


def as_part(data: bytes, **others: Any) -> dict[str, Any]:
    """Return a content part in OpenAI's format."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}} | others


def as_url(data: bytes, **others: Any) -> dict[str, Any]:
    """Return a content part in vLLM's format."""
    return {
        "type": "audio_url",
        "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(data).decode()}"},
    } | others


def prepare(preparer: RequestPreparer, *parts: Any, salt: str | None = None) -> PreparedRequest:
    return preparer.prepare_chat(ask(*parts, "What is that?"), PARAMS, cache_salt=salt)


def hashes_of(prepared: PreparedRequest) -> list[str]:
    return [item.media_hash for item in prepared.engine_request.media]


def test_the_tokens_equal_those_of_the_reference(preparer: RequestPreparer, checkpoint: Path) -> None:
    processor = load_sound_processor(checkpoint)

    @settings(max_examples=12)
    @given(st.lists(st.integers(641, 20_000), min_size=1, max_size=3), st.booleans())
    def check(lengths: list[int], has_two_turns: bool) -> None:
        messages = ask(*(as_part(wav(length)) for length in lengths), "What is that?")
        if has_two_turns:
            messages += [{"role": "assistant", "content": "A dog."}, *ask(as_part(wav(lengths[0])), "And that?")]
            lengths = [*lengths, lengths[0]]
        request = preparer.prepare_chat(messages, PARAMS).engine_request
        audio = [as_floats(drawn(length)) for length in lengths]
        turns = [{**turn, "content": _as_in_templates(turn["content"])} for turn in messages]
        text = processor.apply_chat_template(turns, add_generation_prompt=True)
        assert list(request.token_ids) == processor(text=text, audio=audio, sampling_rate=RATE)["input_ids"][0]
        assert [item.geometry for item in request.media] == [Geometry(num_samples=length) for length in lengths]
        assert {item.modality for item in request.media} == {"audio"}
        assert request.num_audio_tokens == request.token_ids.count(preparer.tokenizer.token_id(SOUND))
        assert request.num_image_tokens == 0

    check()


def _as_in_templates(content: Any) -> Any:
    return content if isinstance(content, str) else [part | _KINDS.get(part["type"], {}) for part in content]


_KINDS = {"input_audio": {"type": "audio"}}


def test_a_sound_gives_the_reference_s_samples_however_it_is_sent(preparer: RequestPreparer) -> None:
    floats = as_floats(drawn())
    forms: list[Any] = [
        as_part(wav()),
        as_url(wav()),
        # As clients of Alibaba's own service send it.
        {"type": "input_audio", "input_audio": {"data": as_url(wav())["audio_url"]["url"], "format": "wav"}},
        {"type": "audio", "audio": wav()},
        {"type": "audio", "audio": floats},
        {"type": "audio", "audio": (floats, RATE)},
        as_part(sound("flac", "flac")),
    ]
    for form in forms:
        prepared = prepare(preparer, form)
        [samples] = prepared.pixels_of(hashes_of(prepared)).values()
        assert np.array_equal(carried_samples(samples), floats)
    [at_another_rate] = prepare(preparer, {"type": "audio", "audio": (floats, 8_000)}).engine_request.media
    assert at_another_rate.geometry == Geometry(num_samples=16_000)


def test_a_prompt_s_sounds_are_at_its_markers(preparer: RequestPreparer) -> None:
    prompt = f"{SOUND} or {SOUND}?"
    media: dict[Kind, Any] = {"audio": [wav(9_000), (as_floats(drawn()), RATE)]}
    first, second = preparer.prepare_text(prompt, media, PARAMS, uuids={"audio": ["first", None]}).engine_request.media
    assert (first.geometry.num_samples, second.geometry.num_samples) == (9_000, 8_000)
    with pytest.raises(InvalidArgumentError, match=r"1 <\|AUDIO\|> markers for 2 sounds"):
        preparer.prepare_text(SOUND, media, PARAMS)


# Names --------------------------------------------------------------------------------------------------------


def test_a_sound_is_hashed_by_content_and_read_once(preparer: RequestPreparer, looked_at: list[SoundSource]) -> None:
    flac = sound("flac", "flac")
    [name], [again] = hashes_of(prepare(preparer, as_part(flac))), hashes_of(prepare(preparer, as_url(flac)))
    assert name == again
    assert looked_at == [flac]
    [salted] = hashes_of(prepare(preparer, as_part(flac), salt="theirs"))
    assert salted != name
    assert hashes_of(prepare(preparer, as_part(wav()))) != [name]


def test_files_with_the_same_samples_share_a_hash_once_decoded(preparer: RequestPreparer) -> None:
    forms = [as_part(wav()), as_part(sound("flac", "flac")), {"type": "audio", "audio": as_floats(drawn())}]
    names = [hashes_of(prepare(preparer, form))[0] for form in forms]
    assert len(set(names)) == 3
    for form in forms:
        prepared = prepare(preparer, form)
        prepared.learn(prepared.pixels_of(hashes_of(prepared)))
    assert [hashes_of(prepare(preparer, form))[0] for form in forms] == names[:1] * 3


def test_samples_of_another_rate_are_another_sound(preparer: RequestPreparer) -> None:
    """Even if resampling gives the same number of samples for both."""
    values = as_floats(drawn())[:1_000]
    parts = [{"type": "audio", "audio": (values, rate)} for rate in (44_100, 44_101)]
    first, second = prepare(preparer, *parts).engine_request.media
    assert first.geometry == second.geometry
    assert first.media_hash != second.media_hash


def test_a_sound_can_be_sent_by_uuid_alone_and_another_length_needs_another_uuid(preparer: RequestPreparer) -> None:
    sent = prepare(preparer, as_part(wav(), uuid="bark"))
    for left_out in ({"type": "input_audio", "input_audio": None}, {"type": "audio_url", "audio_url": None}):
        named = prepare(preparer, left_out | {"uuid": "bark"})
        assert hashes_of(named) == hashes_of(sent)
        assert named.engine_request.token_ids == sent.engine_request.token_ids
    with pytest.raises(MediaConflictError, match="has 9000 samples, but the uuid 'bark' already names one with 8000"):
        prepare(preparer, as_part(wav(9_000), uuid="bark"))
    with pytest.raises(UnknownMediaError):
        prepare(preparer, {"type": "input_audio", "input_audio": None, "uuid": "meow"})


# Refusals -----------------------------------------------------------------------------------------------------


def test_too_long_and_too_short_sounds_are_refused_with_both_numbers(preparer: RequestPreparer) -> None:
    assert prepare(preparer, as_part(wav(480_000))).engine_request.num_audio_tokens == 750
    with pytest.raises(PictureTooLargeError, match=r"has 30\.0000625 seconds, this model takes at most 30") as caught:
        prepare(preparer, as_part(wav(480_001)))
    assert caught.value.field == "messages[0].content[0].input_audio.data"
    assert caught.value.status == 413
    assert prepare(preparer, as_part(wav(321))).engine_request.num_audio_tokens == 1
    with pytest.raises(UnsupportedPictureError, match=r"has 320 samples at 16000 per second, .* at least 321"):
        prepare(preparer, as_part(wav(320)))


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        ({"type": "input_audio"}, "input_audio", "must be an object, not None"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": 1}}, "input_audio.format", "a string, not 1"),
        ({"type": "input_audio", "input_audio": {"format": "wav"}}, "input_audio.data", "must be a string, not None"),
        ({"type": "input_audio", "input_audio": {"data": "x:AAAA"}}, "input_audio.data", "x: URLs are not"),
        (as_part(b"x") | {"voice": "alloy"}, "voice", "is unknown"),
        ({"type": "audio_url", "audio_url": {"url": "x", "detail": "low"}}, "audio_url.detail", "is unknown"),
        ({"type": "audio", "audio": 3}, "audio", "must be a URL, not 3"),
    ],
)
def test_an_invalid_part_is_refused_by_its_path(preparer: RequestPreparer, part: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        prepare(preparer, part)
    assert caught.value.field == f"messages[0].content[0].{field}"


def test_invalid_base64_and_bytes_that_are_no_sound_are_refused(preparer: RequestPreparer) -> None:
    part = as_part(b"") | {"input_audio": {"data": "%%%%", "format": "wav"}}
    with pytest.raises(UnreadablePictureError, match="is not base64"):
        prepare(preparer, part)
    with pytest.raises(UnreadablePictureError, match="8 bytes that are none of WAV, FLAC, MP3"):
        prepare(preparer, as_part(b"no sound"))


def test_a_text_must_not_contain_a_sound_s_marker(preparer: RequestPreparer) -> None:
    with pytest.raises(InvalidArgumentError, match=r"2 <\|AUDIO\|> markers for 1 sounds"):
        prepare(preparer, as_part(wav()), SOUND)
    token_id = preparer.tokenizer.token_id(SOUND)
    assert token_id is not None
    with pytest.raises(ReservedTokenError, match=r"<\|AUDIO\|>"):
        preparer.prepare_tokens([token_id], PARAMS)


def test_the_number_of_sounds_in_a_request_is_limited(checkpoint: Path) -> None:
    preparer = RequestPreparer.from_config(Config(model=str(checkpoint), limit_mm_per_prompt={"audio": 1}))
    with pytest.raises(TooManyPicturesError, match=r"2 sounds, at most 1 may be sent \(limit_mm_per_prompt\)"):
        prepare(preparer, as_part(wav()), as_part(wav()))
    preparer.close()


def test_media_that_a_model_does_not_take_are_refused(preparer: RequestPreparer) -> None:
    with pytest.raises(UnsupportedFieldError, match="is a picture, but this model takes none"):
        prepare(preparer, by_url(draw(1).picture))
    with pytest.raises(UnsupportedFieldError, match="is a PDF, whose pages are read as pictures, but this"):
        prepare(preparer, {"type": "file", "file": {"file_data": "JVBERi0="}})
    with pytest.raises(UnsupportedFieldError, match=r"is a video, but this model takes none$"):
        prepare(preparer, {"type": "video_url", "video_url": "data:video/mp4;base64,AAAA"})
    seeing = RequestPreparer.from_config(Config(model=str(DEMO)))
    with pytest.raises(UnsupportedFieldError, match="is a sound, but this model takes none"):
        prepare(seeing, as_part(wav()))
    for data in (wav(), sound("mp3", "libmp3lame", rate=44_100)):
        with pytest.raises(UnsupportedPictureError, match="is a sound, not a picture; this model takes none"):
            seeing.prepare_text("<start_of_image>", {"image": [data]}, PARAMS)
    seeing.close()


def test_changing_samples_afterwards_has_no_effect(preparer: RequestPreparer) -> None:
    values = as_floats(drawn()).copy()
    prepared = prepare(preparer, {"type": "audio", "audio": values})
    values[:] = 0
    [samples] = prepared.pixels_of(hashes_of(prepared)).values()
    assert np.array_equal(carried_samples(samples), as_floats(drawn()))
    assert isinstance(prepared._pictures[0].picture.source, Samples)
