"""The published configurations of Qwen3-VL, reduced to the fields that determine shapes."""

from typing import Any


def _publish(
    text: dict[str, Any],
    vision: dict[str, Any],
    *,
    ties: bool,
    architecture: str = "Qwen3VLForConditionalGeneration",
    model_type: str = "qwen3_vl",
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "image_token_id": 151_655,
        "video_token_id": 151_656,
        "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653,
        "model_type": model_type,
        "text_config": {
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 262_144,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5_000_000,
            "vocab_size": 151_936,
            **text,
        },
        "tie_word_embeddings": ties,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "model_type": model_type,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
    }


_SMALLER_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_LARGER_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
REAL_CONFIGS: dict[str, dict[str, Any]] = {
    "2b": _publish(
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_hidden_layers": 28},
        _SMALLER_TOWER,
        ties=True,
    ),
    "4b": _publish(
        {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_hidden_layers": 36},
        _SMALLER_TOWER,
        ties=True,
    ),
    "8b": _publish(
        {"hidden_size": 4096, "intermediate_size": 12_288, "num_attention_heads": 32, "num_hidden_layers": 36},
        _LARGER_TOWER,
        ties=False,
    ),
}
MIXTURES: dict[str, dict[str, Any]] = {
    "30b-a3b": _publish(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
        _LARGER_TOWER,
        ties=False,
        architecture="Qwen3VLMoeForConditionalGeneration",
        model_type="qwen3_vl_moe",
    ),
}
