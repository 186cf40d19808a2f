"""A checkpoint's sound preprocessing: sampling rate, maximum length, and number of tokens.

Read from the JSON files beside its weights, and equal to what the reference's WhisperFeatureExtractor does with
Qwen2AudioProcessor. Computes with a sound's length alone: no samples, no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from keepsight.errors import CheckpointConfigError
from keepsight.image_processor_config import read_processor
from keepsight.json_fields import JsonFields

EXTRACTOR = "WhisperFeatureExtractor"
# Window and hop of the spectrogram, in samples; the same for all of Whisper's extractors.
FRAME_LENGTH, HOP_LENGTH = 400, 160
# The tower keeps every second frame (a place), and a token is two of these.
SAMPLES_PER_PLACE = 2 * HOP_LENGTH
PLACES_PER_TOKEN = 2
# Fields that affect the samples or their spectrogram, with the only supported value, which is also the default.
SUPPORTED: Mapping[str, object] = {
    "feature_extractor_type": EXTRACTOR,
    "n_fft": FRAME_LENGTH,
    "hop_length": HOP_LENGTH,
    "dither": 0.0,
    "do_normalize": False,
    "padding_side": "right",
    "padding_value": 0.0,
}


@dataclass(frozen=True, slots=True)
class SoundConfig:
    """The defaults are those of WhisperFeatureExtractor."""

    sampling_rate: int = 16_000
    # Number of mel bands per frame.
    num_mels: int = 80
    # Maximum length of a sound in seconds.
    chunk_length: int = 30

    @classmethod
    def from_checkpoint(cls, directory: Path) -> Self:
        found = read_processor(directory, "feature_extractor", "preprocessor_config.json")
        if found is None:
            path = directory / "preprocessor_config.json"
            raise CheckpointConfigError(path, "is missing, though config.json has an audio tower")
        path, values = found
        _check_supported(path, values)
        fields, default = JsonFields(path, values), cls()
        config = cls(
            fields.integer("sampling_rate", default.sampling_rate),
            fields.integer("feature_size", default.num_mels),
            fields.integer("chunk_length", default.chunk_length),
        )
        if config.max_samples % SAMPLES_PER_PLACE:
            raise fields.refuse("chunk_length", f"must be a multiple of {SAMPLES_PER_PLACE} samples")
        return config

    @property
    def max_samples(self) -> int:
        return self.chunk_length * self.sampling_rate

    @property
    def min_samples(self) -> int:
        """The length of the shortest sound that has a token."""
        return (PLACES_PER_TOKEN - 1) * SAMPLES_PER_PLACE + 1

    @property
    def max_frames(self) -> int:
        return self.max_samples // HOP_LENGTH

    @property
    def max_tokens(self) -> int:
        return self.num_tokens(self.max_samples)

    def num_tokens(self, num_samples: int) -> int:
        return num_places(num_samples) // PLACES_PER_TOKEN


def num_places(num_samples: int) -> int:
    """Return a sound's number of places in the tower. An unpaired last one is in no token, but all attend to it."""
    return -(-num_samples // SAMPLES_PER_PLACE)


def _check_supported(path: Path, values: Mapping[str, Any]) -> None:
    for name, supported in SUPPORTED.items():
        if (value := values.get(name, supported)) != supported:
            raise CheckpointConfigError(path, f"{name}: only {supported!r} is supported, got {value!r}")
