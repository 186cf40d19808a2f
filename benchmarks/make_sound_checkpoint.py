"""Makes a checkpoint in Qwen2-Audio's shape, with fewer and narrower layers: 30 s have 750 tokens, as published."""

import pydoc_data.topics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.byte_level_tokenizer import write_byte_level_tokenizer
from tests.sound_checkpoint import write_sound_checkpoint

VOCAB_SIZE, MAX_LENGTH = 8192, 8192
SoundSize = Mapping[str, Mapping[str, Any]]
SOUND_SIZES: Mapping[str, SoundSize] = {
    "tiny-qwen2-audio": {
        "text": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6},
        "audio": {"d_model": 192, "encoder_ffn_dim": 768, "encoder_layers": 4, "encoder_attention_heads": 3},
    },
}
_COMMON = {
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LENGTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def make_sound_checkpoint(folder: Path, size: SoundSize, dtype: torch.dtype, seed: int) -> int:
    """Write the checkpoint.  Return the number of its parameters."""
    audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, "max_source_positions": 1500, **size["audio"]}
    arguments = {"text_config": {**_COMMON, **size["text"]}, "audio_config": audio}
    corpus = pydoc_data.topics.topics.values()
    train = partial(write_byte_level_tokenizer, corpus=corpus, vocab_size=VOCAB_SIZE - 48)
    model = write_sound_checkpoint(folder, arguments, seed, dtype, train)
    return sum(each.numel() for each in model.parameters())
