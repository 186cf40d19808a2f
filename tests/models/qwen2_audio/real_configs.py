"""The published configuration of Qwen2-Audio, 7B and 7B-Instruct, reduced to the fields that determine shapes."""

from typing import Any

PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_token_index": 151_646,
    "ignore_index": -100,
    "vocab_size": 156_032,
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "activation_function": "gelu",
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 32,
        "max_source_positions": 1500,
        "num_mel_bins": 128,
        "scale_embedding": False,
    },
    "text_config": {
        "model_type": "qwen2",
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "intermediate_size": 11_008,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10_000,
        "sliding_window": 32_768,
        "use_mrope": False,
        "vocab_size": 156_032,
    },
}
