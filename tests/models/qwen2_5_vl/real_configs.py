"""The published configurations of Qwen2.5-VL, flat as published, reduced to the fields that determine shapes."""

from typing import Any


def _publish(text: dict[str, Any], *, wide: int = 3420, ties: bool = False) -> dict[str, Any]:
    """`wide`: the width of the tower's feed-forward."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "max_window_layers": text["num_hidden_layers"],
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1_000_000.0,
        "sliding_window": 32_768,
        "tie_word_embeddings": ties,
        "use_sliding_window": False,
        "vocab_size": 152_064,
        **text,
        "vision_config": {
            "depth": 32,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": wide,
            "num_heads": 16,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        },
    }


def _text(hidden_size: int, wide: int, num_layers: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": wide,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
    }


REAL_CONFIGS: dict[str, dict[str, Any]] = {
    "3b": _publish(_text(2048, 11_008, 36, 16, 2) | {"vocab_size": 151_936}, ties=True),
    "7b": _publish(_text(3584, 18_944, 28, 28, 4)),
    "32b": _publish(_text(5120, 27_648, 64, 40, 8), wide=3456),
    "72b": _publish(_text(8192, 29_568, 80, 64, 8), wide=3456),
}
