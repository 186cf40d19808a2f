"""What checkpoints in the wild call Qwen3-VL's tensors, and what they are called here.

Published files: `model.language_model.*`, `model.visual.*`, `lm_head.*`.  Saved without the head: these without their
`model`.  Names of layers are those that other families have for the same.
"""

import re

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.)?visual\.", "tower."),
        (r"^(model\.)?language_model\.", "decoder."),
        (r"^(tower\.blocks\.\d+)\.norm([12])\.", r"\1.layer_norm\2."),
        (r"^(tower\.blocks\.\d+)\.attn\.qkv\.", r"\1.self_attn.qkv."),
        (r"^(tower\.blocks\.\d+)\.attn\.proj\.", r"\1.self_attn.out_proj."),
        (r"^(tower\.blocks\.\d+)\.mlp\.linear_", r"\1.mlp."),
        # Before the feed-forward, not behind attention, as Gemma's norm of that name.
        (r"^(decoder\.layers\.\d+)\.post_attention_layernorm\.", r"\1.pre_feedforward_layernorm."),
    )
]


def canonical_name(name: str) -> str:
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name
