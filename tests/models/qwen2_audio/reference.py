"""Random small Qwen2-Audio checkpoints, and transformers' own answers about them: the outside judge."""

import random
from collections.abc import Mapping
from typing import Any

from tests.models.qwen3_vl.reference import VOCAB_SIZE, settle

AUDIO_TOKEN = 299
# In seconds, and what follows from it.
CHUNK_LENGTH = 1
NUM_PLACES = 50


def draw_config(seed: int) -> dict[str, Any]:
    """The keyword arguments of one random configuration; together the seeds vary everything that can vary."""
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
