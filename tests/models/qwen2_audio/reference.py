"""Random small Qwen2-Audio checkpoints, and what transformers computes with them: the reference."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from keepsight.media import Geometry, MediaItem, TokenSpan
from keepsight.pixels import carry_samples
from keepsight.runner.mel_spectrogram import MelSpectrogram
from keepsight.sound_config import SAMPLES_PER_PLACE, SoundConfig
from tests.models.qwen3_vl.reference import VOCAB_SIZE, Prompt, settle

Samples = npt.NDArray[np.float32]
AUDIO_TOKEN, BEGIN_TOKEN, END_TOKEN = 299, 298, 297
# Of one second, the longest sound.
NUM_PLACES = 50


def draw_config(seed: int) -> dict[str, Any]:
    """Return the keyword arguments of one random configuration; together the seeds vary everything that can vary."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 4])
    audio_heads = rng.choice([1, 2, 3])
    return {
        "text_config": {
            "model_type": "qwen2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": heads * rng.choice([8, 16, 32]),
            "intermediate_size": rng.choice([40, 96]),
            "num_hidden_layers": rng.choice([2, 3]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": rng.choice([1e-6, 1e-3]),
            "hidden_act": rng.choice(["silu", "silu", "silu", "gelu_pytorch_tanh"]),
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e6, 1e4])},
            # Irrelevant: transformers ties no head of this model.
            "tie_word_embeddings": rng.random() < 0.5,
            "eos_token_id": 1,
        },
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": rng.choice([5, 16, 80]),
            "d_model": audio_heads * rng.choice([8, 16, 24]),
            "encoder_layers": rng.choice([1, 3]),
            "encoder_attention_heads": audio_heads,
            "encoder_ffn_dim": rng.choice([40, 72]),
            "activation_function": rng.choice(["gelu", "gelu", "gelu_pytorch_tanh"]),
            "max_source_positions": NUM_PLACES,
        },
    }


def make_reference(arguments: Mapping[str, Any], seed: int, audio_token: int = AUDIO_TOKEN) -> Any:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    config: Any = Qwen2AudioConfig
    return settle(Qwen2AudioForConditionalGeneration, config(**arguments, audio_token_index=audio_token), seed)


def sound_config(arguments: Mapping[str, Any]) -> SoundConfig:
    return SoundConfig(num_mels=arguments["audio_config"]["num_mel_bins"], chunk_length=1)


def draw_sound(num_samples: int, seed: int) -> Samples:
    """Draw a sound with loud and faint parts, and silence."""
    rng = np.random.default_rng(seed)
    loudness = np.repeat(rng.choice([0.0, 1e-5, 0.1, 1.0], -(-num_samples // 400)), 400)[:num_samples]
    sound: Samples = (rng.standard_normal(num_samples) * loudness).astype(np.float32)
    return sound


def show_sound(config: SoundConfig, name: str, num_samples: int, start: int) -> tuple[list[int], MediaItem]:
    """Return the tokens that stand for the sound in a prompt from position `start` on, and its media item."""
    span = TokenSpan(start + 1, config.num_tokens(num_samples))
    token_ids = [BEGIN_TOKEN, *[AUDIO_TOKEN] * span.length, END_TOKEN]
    return token_ids, MediaItem(name, span, Geometry(num_samples=num_samples), "audio")


@dataclass(frozen=True)
class SoundPrompt(Prompt):
    """A prompt whose pixels are spectrograms."""

    sounds: list[Samples]


def draw_prompt(arguments: Mapping[str, Any], num_sounds: int, seed: int, num_words: int = 11) -> SoundPrompt:
    rng, config = random.Random(seed), sound_config(arguments)
    make_spectrogram = MelSpectrogram(config, "cpu", torch.float32)
    prompt = SoundPrompt([2], [], [], [])
    for index in range(num_sounds):
        # The longest, or any; some of these end where a place does, or one sample before or after.
        length = rng.randrange(2, NUM_PLACES) * SAMPLES_PER_PLACE + rng.choice([0, 1, 160, 161, rng.randrange(320)])
        sound = draw_sound(rng.choice([config.max_samples, length, length, length]), seed + index)
        shown, item = show_sound(config, str(index), len(sound), len(prompt.token_ids))
        prompt.token_ids.extend(shown)
        prompt.media.append(item)
        prompt.sounds.append(sound)
        prompt.pixels.append(make_spectrogram(torch.from_numpy(carry_samples(sound))[None])[0])
    prompt.token_ids.extend(rng.randrange(3, END_TOKEN) for _ in range(num_words))
    return prompt


def reference_inputs(token_ids: Sequence[int], sounds: Sequence[Samples], config: SoundConfig) -> dict[str, Any]:
    """Return inputs like those of transformers' processor."""
    from transformers import WhisperFeatureExtractor

    ids = torch.tensor([list(token_ids)])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if sounds:
        make: Any = WhisperFeatureExtractor
        extractor = make(feature_size=config.num_mels, chunk_length=config.chunk_length)
        options = {"sampling_rate": config.sampling_rate, "return_attention_mask": True, "return_tensors": "pt"}
        features = extractor(list(sounds), **options)
        inputs |= {"input_features": features["input_features"], "feature_attention_mask": features["attention_mask"]}
    return inputs
