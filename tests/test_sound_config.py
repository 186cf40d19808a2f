"""A sound has as many tokens as with transformers' processor; settings that would change the sound are refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.processor_config import ProcessorConfig
from keepsight.sound_config import SoundConfig

# As published with Qwen2-Audio and as transformers re-saves it.
PUBLISHED: dict[str, Any] = {
    "chunk_length": 30,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480_000,
    "nb_max_frames": 3000,
    "padding_side": "right",
    "padding_value": 0.0,
    "processor_class": "Qwen2AudioProcessor",
    "return_attention_mask": True,
    "sampling_rate": 16_000,
}


def write(directory: Path, audio: dict[str, Any] | None = None, **changed: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({"audio_config": {"num_mel_bins": 128} | (audio or {})}))
    (directory / "preprocessor_config.json").write_text(json.dumps(PUBLISHED | changed))
    return directory


def read(directory: Path, **options: Any) -> ProcessorConfig:
    config = ProcessorConfig.from_checkpoint(directory, "pil", options)
    assert config is not None
    return config


def test_a_model_may_take_only_sounds(tmp_path: Path) -> None:
    config = read(write(tmp_path))
    assert not config.takes_pictures
    assert config.sound == SoundConfig(16_000, 128, 30)
    assert (config.max_tokens_per_item, config.request_options) == (750, frozenset())
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": PUBLISHED}))
    assert read(tmp_path) == config


def test_a_sound_has_as_many_tokens_as_transformers_gives_it() -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

    make: Any = WhisperFeatureExtractor
    config, extractor = SoundConfig(num_mels=2, chunk_length=1), make(feature_size=2, chunk_length=1)
    processor: Any = SimpleNamespace(feature_extractor=extractor, audio_token="a")
    processor.replace_audio_token = lambda inputs, audio_idx: inputs["num_audio_tokens"][audio_idx]
    lengths = [*range(config.min_samples, 1200, 37), *range(15_000, 16_001, 40), 640, 641, 960, 961, 15_999]
    sounds = [np.zeros(length, np.float32) for length in lengths]
    _, theirs = Qwen2AudioProcessor._process_audio(processor, sounds, sampling_rate=16_000)
    assert [config.num_tokens(length) for length in lengths] == theirs
    assert [config.num_tokens(length) for length in (config.min_samples - 1, config.min_samples)] == [0, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dither": 1e-4}, "dither: only 0.0 is supported, got 0.0001"),
        ({"do_normalize": True}, "do_normalize: only False is supported"),
        ({"hop_length": 320}, "hop_length: only 160 is supported, got 320"),
        ({"feature_extractor_type": "ClapFeatureExtractor"}, "feature_extractor_type: only 'WhisperFeatureExtractor'"),
        ({"sampling_rate": 16_010}, "chunk_length: must be a multiple of 320 samples"),
        ({"feature_size": 80}, r"audio_config\.num_mel_bins: is 128, but the feature extractor has 80"),
        ({"chunk_length": 20}, r"audio_config\.max_source_positions: is 1500, but the feature extractor has 1000"),
    ],
)
def test_an_unsupported_feature_extractor_value_is_refused_by_name(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointConfigError, match=message):
        read(write(tmp_path, **changed))


def test_a_missing_processor_file_and_picture_options_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"max_pixels: cannot be changed; these can: none"):
        read(write(tmp_path), max_pixels=5)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointConfigError, match=r"preprocessor_config\.json: is missing, though config.json has a"):
        read(tmp_path)
