"""The length read from a sound equals what decoding gives; any input is a sound or refused."""

import io
import random
import sys

import av
import numpy as np
import pytest

from keepsight.errors import KeepsightError, PictureTooLargeError, UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake import read_sound as reading
from keepsight.frontend.intake.read_sound import read_sound
from keepsight.frontend.intake.sound_samples import Samples, SoundSource
from keepsight.media import Geometry
from tests.frontend.sample_films import film
from tests.frontend.sample_sounds import KINDS, RATE, sound, wav, wav_of

FIELD = "messages[0].content[1]"


def by_reference(data: bytes) -> Geometry:
    """Decode as vLLM's PyAV reader does; return the number of samples after torchaudio's resampling."""
    with av.open(io.BytesIO(data), "r") as container:
        num_samples = sum(frame.samples for frame in container.decode(audio=0))
        return Geometry(num_samples=-(-num_samples * RATE // container.streams.audio[0].rate))


@pytest.mark.parametrize(("format_", "codec", "rate"), KINDS)
def test_a_sound_is_as_long_as_decoding_gives(format_: str, codec: str, rate: int) -> None:
    data = sound(format_, codec, num_channels=2, rate=rate)
    assert read_sound(data, FIELD, RATE) == by_reference(data)


def test_the_length_of_a_wav_and_of_samples_is_known_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for rate, expected in ((16_000, 8_000), (48_000, 2_667), (44_100, 2_903), (8_000, 16_000)):
        assert read_sound(wav(rate=rate), FIELD, RATE) == Geometry(num_samples=expected)
        samples = Samples(np.zeros(8_000, np.float32), rate)
        assert read_sound(samples, FIELD, RATE) == Geometry(num_samples=expected)
    with pytest.raises(UnsupportedPictureError, match=r"PyAV is missing: pip install 'keepsight\[audio\]'"):
        read_sound(sound(*KINDS[0][:2]), FIELD, RATE)


def test_of_a_film_its_sound_is_taken_and_one_without_is_refused() -> None:
    with pytest.raises(UnreadablePictureError, match="a file without sound"):
        read_sound(film(), FIELD, RATE)


@pytest.mark.parametrize(("format_", "codec", "rate"), [each for each in KINDS if each[0] in ("flac", "ipod", "webm")])
def test_a_title_may_be_in_any_encoding(format_: str, codec: str, rate: int) -> None:
    in_latin = sound(format_, codec, rate=rate, title="Gr_n").replace(b"Gr_n", b"Gr\xfcn")
    assert b"Gr\xfcn" in in_latin
    assert read_sound(in_latin, FIELD, RATE) == read_sound(sound(format_, codec, rate=rate), FIELD, RATE)


@pytest.mark.parametrize(("format_", "codec"), [("flac", "flac"), ("adts", "aac"), ("mp3", "libmp3lame")])
def test_a_tag_may_come_before_the_sound(format_: str, codec: str) -> None:
    data = sound(format_, codec, rate=48_000)
    for size in (10, 300):
        tag = b"ID3\4\0\0" + bytes([0, 0, size >> 7, size & 0x7F]) + bytes(size)
        assert read_sound(tag + data, FIELD, RATE) == by_reference(tag + data) == read_sound(data, FIELD, RATE)


# Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"no sound", b"#EXTM3U\nfile:///etc/passwd\n", b"\x89PNG\r\n\x1a\n" + bytes(99), b"RIFF\0\0\0\0AVI "]
)
def test_what_is_none_of_the_formats_never_reaches_ffmpeg(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(av, "open", None)
    with pytest.raises(UnreadablePictureError, match="bytes that are none of WAV, FLAC, MP3, OGG, Opus, AAC, M4A"):
        read_sound(data, FIELD, RATE)


def test_a_codec_that_sounds_seldom_have_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedPictureError, match="a sound in ac3; these are read: aac, alac, flac"):
        read_sound(sound("matroska", "ac3", rate=48_000), FIELD, RATE)


@pytest.mark.parametrize("source", [wav(0), Samples(np.zeros(0, np.float32), RATE)])
def test_a_sound_without_samples_is_refused(source: SoundSource) -> None:
    with pytest.raises(UnreadablePictureError, match="a sound without samples"):
        read_sound(source, FIELD, RATE)


@pytest.mark.parametrize("rate", [0, 999, 384_001, 2**32 - 1])
def test_a_rate_that_nobody_records_with_is_refused(rate: int) -> None:
    data = bytearray(wav_of(bytes(8)))
    data[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(UnreadablePictureError, match=f"a sound with {rate} samples per second; 1000 to 384000"):
        read_sound(bytes(data), FIELD, RATE)


def test_what_is_longer_than_anybody_takes_is_not_decoded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_SECONDS", 0.4)
    for source in (wav(), sound("flac", "flac")):
        with pytest.raises(PictureTooLargeError, match=r"more than 0\.4 seconds, the most that a sound may have"):
            read_sound(source, FIELD, RATE)


def test_whatever_is_done_to_a_sound_it_is_a_sound_or_refused() -> None:
    chance, outcomes = random.Random(0), set()
    for _ in range(300):
        data = bytearray(sound(*chance.choice(KINDS)[:2], rate=48_000))
        for _ in range(chance.choice([1, 3, 30])):
            data[chance.randrange(chance.choice([200, len(data)]))] = chance.randrange(256)
        try:
            outcomes.add(read_sound(bytes(data[: chance.choice([-1, len(data) // 2])]), FIELD, RATE).num_samples > 0)
        except KeepsightError as error:
            outcomes.add(str(error).startswith(FIELD))
    assert outcomes == {True}
