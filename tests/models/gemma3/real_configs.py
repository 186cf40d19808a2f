"""config.json of the published Gemma 3 checkpoints, in their own form: most values are left to defaults."""

from typing import Any

_VISION = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}


def _multimodal(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            **text,
        },
        "torch_dtype": "bfloat16",
        "vision_config": _VISION,
    }


def _text_only(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
        "vocab_size": 262144,
        **text,
    }


REAL_CONFIGS: dict[str, dict[str, Any]] = {
    "4b": _multimodal(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "12b": _multimodal(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8
    ),
    "27b": _multimodal(
        head_dim=128,
        hidden_size=5376,
        intermediate_size=21504,
        num_attention_heads=32,
        num_hidden_layers=62,
        num_key_value_heads=16,
        query_pre_attn_scalar=168,
    ),
    "1b": _text_only(hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, sliding_window_pattern=6),
    "270m": _text_only(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        layer_types=[("sliding_attention", "full_attention")[(layer + 1) % 6 == 0] for layer in range(18)],
        _sliding_window_pattern=6,
    ),
}
NUM_PARAMETERS = {
    "4b": 4_300_079_472,
    "12b": 12_187_325_040,
    "27b": 27_432_406_640,
    "1b": 999_885_952,
    "270m": 268_098_176,
}
