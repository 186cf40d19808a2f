"""Samples equal the reference's: exactly if the rate stays the same, else as vLLM resamples them."""

import math

import numpy as np
import pytest
import torch

from keepsight.errors import UnreadablePictureError, UnsupportedPictureError
from keepsight.frontend.intake import open_sound
from keepsight.frontend.intake.read_sound import read_sound
from keepsight.frontend.intake.sound_samples import Samples
from keepsight.frontend.pixels.decode_sound import decode_sound
from keepsight.frontend.pixels.resample_sound import NUM_ZEROS, ROLLOFF, resample
from tests.frontend.sample_sounds import KINDS, RATE, as_floats, drawn, sound, wav, wav_of


def test_a_wav_and_a_flac_have_the_reference_s_samples_exactly() -> None:
    for num_channels in (1, 2):
        expected = as_floats(drawn(900, num_channels))
        for data in (wav(900, num_channels), sound("flac", "flac", 900, num_channels)):
            assert np.array_equal(decode_sound(data, RATE, 900), expected)


@pytest.mark.parametrize(("format_", "codec", "rate"), KINDS)
def test_a_sound_has_the_samples_that_it_was_said_to_have(format_: str, codec: str, rate: int) -> None:
    data = sound(format_, codec, 9_000, 2, rate)
    num_samples = read_sound(data, "audio", RATE).num_samples
    assert len(decode_sound(data, RATE, num_samples)) == num_samples
    for num_claimed in (num_samples - 300, num_samples + 1):
        with pytest.raises(UnreadablePictureError, match=f"its header says that there are {num_claimed} samples"):
            decode_sound(data, RATE, num_claimed)


def test_as_many_channels_as_a_frame_has_addresses_are_taken_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sound("ogg", "libopus", 9_000, 8, 48_000)
    num_samples = read_sound(data, "audio", RATE).num_samples
    assert 0.01 < np.abs(decode_sound(data, RATE, num_samples)).max() < 1
    monkeypatch.setattr(open_sound, "MAX_CHANNELS", 7)
    with pytest.raises(UnsupportedPictureError, match="a sound of 8 channels; at most 7 are allowed"):
        decode_sound(data, RATE, num_samples)


def test_numbers_that_no_sound_has_are_refused() -> None:
    for value in (float("nan"), float("inf"), 1e11):
        data = wav_of(np.array([0, value], "<f4").tobytes(), kind=3, bits=32)
        with pytest.raises(UnreadablePictureError, match="a NaN, an infinity, or a sample beyond 1e"):
            decode_sound(data, RATE, 2)


def by_torchaudio_s_formula(samples: np.ndarray, rate: int) -> np.ndarray:
    """Convolve the padded sound with torchaudio's full kernel, most of whose weights are zeros."""
    shared = math.gcd(rate, RATE)
    old, new = rate // shared, RATE // shared
    base = min(old, new) * ROLLOFF
    width = math.ceil(NUM_ZEROS * old / base)
    places = torch.arange(-width, width + old, dtype=torch.float64) / old
    times = (torch.arange(0, -new, -1, dtype=torch.float64)[:, None] / new + places) * base
    times = times.clamp(-NUM_ZEROS, NUM_ZEROS)
    weights = torch.sinc(times) * torch.cos(times * math.pi / NUM_ZEROS / 2) ** 2 * base / old
    padded = torch.nn.functional.pad(torch.from_numpy(samples)[None, None], (width, width + old))
    made = torch.nn.functional.conv1d(padded, weights.float()[:, None], stride=old)
    return made[0].T.reshape(-1)[: math.ceil(new * len(samples) / old)].numpy()


@pytest.mark.parametrize("rate", [48_000, 44_100, 22_050, 8_000, 11_025, 96_000])
@pytest.mark.parametrize("num_samples", [1, 100, 9_001])
def test_another_rate_becomes_the_model_s_by_torchaudio_s_formula(rate: int, num_samples: int) -> None:
    samples = np.random.default_rng(0).normal(0, 0.2, num_samples).astype(np.float32)
    expected = by_torchaudio_s_formula(samples, rate)
    resampled = resample(samples, rate, RATE)
    assert resampled.shape == expected.shape
    assert np.abs(resampled - expected).max() < 1e-6
    decoded = decode_sound(Samples(samples, rate), RATE, len(expected))
    assert np.array_equal(decoded, resampled)


def test_rates_that_share_nothing_take_no_more_memory_than_others() -> None:
    assert len(resample(np.zeros(44_101, np.float32), 44_101, RATE)) == RATE
