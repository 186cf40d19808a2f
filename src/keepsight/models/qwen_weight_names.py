"""What checkpoints in the wild call the tensors of Qwen's models of pictures or sounds, and what they are called here.

Published files of Qwen3-VL: `model.language_model.*`, `model.visual.*`, `lm_head.*`.  Saved without the head: these
without their `model`.  Of Qwen2.5-VL: `model.*`, `visual.*`, `lm_head.*`, or as Qwen3-VL's where saved anew.  Of
Qwen2-Audio: `language_model.model.*` (with one `model` more where transformers 5.17 saved it),
`language_model.lm_head.*`, `audio_tower.*`, `multi_modal_projector.*`.  Names of layers are those that other families
have for the same.
"""

import re

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.)?(visual|audio_tower)\.", "tower."),
        (r"^(model\.)?multi_modal_projector\.", "tower.projector."),
        (r"^language_model\.(?=lm_head\.)", ""),
        (r"^(model\.)?language_model\.(model\.){0,2}", "decoder."),
        (r"^model\.(?=(embed_tokens|layers|norm)\.)", "decoder."),
        (r"^(tower\.blocks\.\d+)\.norm([12])\.", r"\1.layer_norm\2."),
        (r"^(tower\.blocks\.\d+)\.attn\.qkv\.", r"\1.self_attn.qkv."),
        (r"^(tower\.blocks\.\d+)\.attn\.proj\.", r"\1.self_attn.out_proj."),
        (r"^(tower\.blocks\.\d+)\.mlp\.linear_", r"\1.mlp."),
        (r"^(tower\.merger)\.ln_q\.", r"\1.norm."),
        (r"^(tower\.merger)\.mlp\.0\.", r"\1.linear_fc1."),
        (r"^(tower\.merger)\.mlp\.2\.", r"\1.linear_fc2."),
        (r"^(tower\.layers\.\d+)\.self_attn_layer_norm\.", r"\1.layer_norm1."),
        (r"^(tower\.layers\.\d+)\.final_layer_norm\.", r"\1.layer_norm2."),
        (r"^(tower\.layers\.\d+)\.(?=fc[12]\.)", r"\1.mlp."),
        # Before the feed-forward, not behind attention, as Gemma's norm of that name.
        (r"^(decoder\.layers\.\d+)\.post_attention_layernorm\.", r"\1.pre_feedforward_layernorm."),
    )
]


def canonical_name(name: str) -> str:
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name
