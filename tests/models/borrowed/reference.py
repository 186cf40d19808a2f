"""Random small checkpoints of architectures that are not ours, and what transformers computes with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 300
SMALL: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Narrower than the prompts.
WINDOW = 16
SPARSE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# Latent attention: as many keys and values as queries, and values are narrower than keys.
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}
# Enough experts that torch's sigmoid of a row has no remainder, whose last bits it computes differently; and not as
# many as a product has outputs that is no router.
SPARSE_BEHIND_ONE = {
    **SPARSE,
    "num_local_experts": 48,
    "n_routed_experts": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
# Recurrent layers and one that attends.
GATED_DELTA: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# A quarter of each head is rotated, by time, rows and columns.
TURNING_IN_PART = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
# Layers that attend and also keep a state.
ATTENDING_AND_RECURRENT = {
    "head_dim": 16,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
}
# Fields that make each model what it is, besides its size.
# The last two of its layers attend to the keys of the second and the third, which are of two shapes.
GEMMA4: Mapping[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 3.0,
}
TEXT_MODELS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": WINDOW},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 32, "tie_word_embeddings": True},
    "Gemma2ForCausalLM": {"head_dim": 16, "sliding_window": WINDOW, "final_logit_softcapping": 3.0},
    "Gemma3nForCausalLM": {
        **GEMMA4,
        "intermediate_size": [96] * 5,
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0],
        "laurel_rank": 4,
    },
    "Gemma4ForCausalLM": GEMMA4,
    "Phi3ForCausalLM": {"sliding_window": WINDOW, "original_max_position_embeddings": 64, "rope_parameters": LONG_ROPE},
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "GPTNeoXForCausalLM": {"use_parallel_residual": True},
    "MixtralForCausalLM": SPARSE,
    "Qwen3MoeForCausalLM": {"head_dim": 16, **SPARSE},
    "GraniteForCausalLM": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "CohereForCausalLM": {"logit_scale": 0.25},
    "Olmo2ForCausalLM": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "SmolLM3ForCausalLM": {},
    # Does not declare that it uses the attention it is given.
    "StableLmForCausalLM": {"use_qkv_bias": True},
    # Its modules are told of no window, which is as wide as its context.
    "PhimoeForCausalLM": {"sliding_window": 256, **SPARSE},
    # One that fits the kernels' tiles, and one that does not.
    "DeepseekV3ForCausalLM": {**LATENT, "qk_nope_head_dim": 24, **SPARSE_BEHIND_ONE},
    "MiniCPM3ForCausalLM": {**LATENT, "qk_nope_head_dim": 12},
    "Qwen3_5ForCausalLM": GATED_DELTA,
    "Qwen3_5MoeForCausalLM": {**GATED_DELTA, **SPARSE, "shared_expert_intermediate_size": 32},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv"], "head_dim": 16},
    "FalconH1ForCausalLM": ATTENDING_AND_RECURRENT,
    # Its head names a product of its own `decoder`.
    "ModernBertDecoderForCausalLM": {"local_attention": 2 * WINDOW},
}


def make_checkpoint(directory: Path, architecture: str, arguments: Mapping[str, Any]) -> Any:
    """Write a checkpoint to `directory`. Return transformers' model of it, with eager attention.

    `arguments`: fields of its configuration.
    """
    import transformers

    model_class: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**arguments))
    randomize(model)
    model.save_pretrained(directory)
    model.set_attn_implementation("eager")
    return model.eval()


def make_text_checkpoint(directory: Path, architecture: str) -> Any:
    return make_checkpoint(directory, architecture, {**SMALL, **TEXT_MODELS[architecture]})


def randomize(model: Any) -> None:
    """Make weights larger than initialized, so that logits differ and softcaps cap; norms stay near 1."""
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1)
        if "norm" in name and parameter.dim() == 1:
            parameter.data += 1


def plain_logits(reference: Any, token_ids: Tensor) -> Tensor:
    """Logits of a prompt alone and in one step: [tokens] -> [tokens, vocabulary]"""
    with torch.inference_mode():
        return reference(input_ids=token_ids[None], use_cache=False).logits[0]  # type: ignore[no-any-return]


def greedy(reference: Any, token_ids: Tensor, num_new: int, arrays: Mapping[str, Tensor] | None = None) -> list[int]:
    """`arrays`: processor output for the pictures in the prompt."""
    with torch.inference_mode():
        made = reference.generate(
            token_ids[None],
            attention_mask=torch.ones_like(token_ids)[None],
            max_new_tokens=num_new,
            do_sample=False,
            eos_token_id=None,
            **arrays or {},
        )
    return made[0, len(token_ids) :].tolist()  # type: ignore[no-any-return]
