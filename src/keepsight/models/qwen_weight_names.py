"""Maps names of tensors in checkpoints of Qwen's models of pictures or sounds to canonical names.

Published files of Qwen3-VL: `model.language_model.*`, `model.visual.*`, `lm_head.*`; saved without the head, the same
without `model`. Qwen2.5-VL: `model.*`, `visual.*`, `lm_head.*`, or like Qwen3-VL if saved again. Qwen2-Audio:
`language_model.model.*` (with one more `model` if saved by transformers 5.17), `language_model.lm_head.*`,
`audio_tower.*`, `multi_modal_projector.*`. Canonical names of layers are the same in all families.
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
        # This norm comes before the feed-forward, unlike Gemma's norm of the same name, which is applied to attention's
        # output.
        (r"^(decoder\.layers\.\d+)\.post_attention_layernorm\.", r"\1.pre_feedforward_layernorm."),
    )
]


def canonical_name(name: str) -> str:
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return name
