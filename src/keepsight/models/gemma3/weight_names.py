"""Maps names of tensors in Gemma 3's checkpoints to canonical names.

Published files: `language_model.model.*`, `vision_tower.vision_model.*`. Saved by newer transformers:
`model.language_model.*`, `model.vision_tower.*`, with or without `vision_model`. Text-only: `model.*`. Saved without
the head: the same without `model`.
"""

import re

from keepsight.models.gemma3.config import Gemma3Config

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^(model\.)?vision_tower\.(vision_model\.)?", "tower."),
        (r"^(model\.)?multi_modal_projector\.", "projector."),
        (r"^(language_model\.)?lm_head\.", "lm_head."),
        (r"^(model\.language_model|language_model\.model|language_model|model)\.", "decoder."),
        (r"^(?=(embed_tokens|layers|norm)\.)", "decoder."),
    )
]


def canonical_name(name: str) -> str:
    for pattern, replacement in _RULES:
        renamed, count = pattern.subn(replacement, name)
        if count:
            return renamed
    return name


def is_never_read(name: str, config: Gemma3Config) -> bool:
    """Return whether a tensor (by canonical name) belongs to a complete checkpoint but is unused by the model."""
    is_pooling_head = name.startswith("tower.head.")
    return is_pooling_head and config.vision is not None and config.vision.has_unused_head
