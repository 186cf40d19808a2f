"""The encoder's input from a sound equals that of transformers' extractor bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from keepsight.pixels import carry_samples
from keepsight.runner.mel_spectrogram import MelSpectrogram, mel_filters
from keepsight.runner.openmp_team import keeping_team_size, set_team_size
from keepsight.sound_config import SoundConfig
from tests.models.qwen2_audio.reference import draw_sound

CONFIGS = [SoundConfig(), SoundConfig(num_mels=128), SoundConfig(num_mels=5, chunk_length=1)]


def extractor(config: SoundConfig) -> Any:
    from transformers import WhisperFeatureExtractor

    make: Any = WhisperFeatureExtractor
    return make(feature_size=config.num_mels, sampling_rate=config.sampling_rate, chunk_length=config.chunk_length)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    with keeping_team_size():
        set_team_size(count)
        yield


def hear(config: SoundConfig, *sounds: np.typing.NDArray[np.float32]) -> Tensor:
    carried = torch.from_numpy(np.stack([carry_samples(sound) for sound in sounds]))
    return MelSpectrogram(config, "cpu", torch.float32)(carried)


def check_equal(config: SoundConfig, sound: np.typing.NDArray[np.float32]) -> None:
    """Also compare the number of frames: all that its places see, and one more."""
    [ours] = hear(config, sound)
    with on_threads(1):
        theirs = extractor(config)([sound], sampling_rate=config.sampling_rate, return_attention_mask=True)
    num_places = (int(theirs["attention_mask"].sum()) - 1) // 2 + 1
    assert len(ours) == min(2 * num_places + 1, config.max_frames)
    assert torch.equal(ours.T, torch.from_numpy(theirs["input_features"][0])[:, : len(ours)])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_filters_are_the_reference_s(config: SoundConfig) -> None:
    assert np.array_equal(mel_filters(config).astype(np.float32), extractor(config).mel_filters.T.astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(length=st.integers(321, 16_000) | st.integers(15_500, 16_000), seed=st.integers(0, 2**32 - 1))
def test_a_sound_of_any_length_is_heard_as_by_the_reference(length: int, seed: int) -> None:
    check_equal(CONFIGS[-1], draw_sound(length, seed))


@pytest.mark.parametrize("length", [321, 48_123, 479_700, 480_000])
def test_a_sound_of_the_published_length_is_heard_as_by_the_reference(length: int) -> None:
    check_equal(CONFIGS[1], draw_sound(length, length))


def test_silence_and_a_silent_end_are_heard_as_by_the_reference() -> None:
    check_equal(CONFIGS[-1], np.zeros(500, np.float32))
    check_equal(CONFIGS[-1], np.concatenate([draw_sound(4000, 1), np.zeros(4000, np.float32)]))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_sound_is_heard_the_same_in_any_batch_and_by_any_number_of_threads(config: SoundConfig) -> None:
    sounds = [draw_sound(3000, seed) for seed in range(3)]
    alone = torch.cat([hear(config, sound) for sound in sounds])
    for count in (1, 2, 7):
        with on_threads(count):
            assert torch.equal(hear(config, *sounds), alone)
            assert torch.get_num_threads() == count
