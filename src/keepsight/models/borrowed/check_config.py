"""Refuses, by name, anything in a model's configuration or its modules' structure that we cannot compute.

Knows nothing of weights: called before any are read.
"""

import inspect
from pathlib import Path
from typing import Any

from keepsight.errors import CheckpointConfigError
from keepsight.models.borrowed.media_tokens import find_media_token
from keepsight.models.borrowed.picture_places import places_as_ours, uses_mrope
from keepsight.models.borrowed.token_rows import check_all_are_read

# Layer types that look at no other token.
ALONE_TYPES = ("mlp", "moe")
# Layer types in which a token sees an interval of positions that ends with its own, and recurrent ones.
_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", *ALONE_TYPES)

# What tells of quantized weights, in config.json and in a file beside it (NVIDIA ModelOpt's).
_QUANTIZATION_FIELDS, _QUANTIZATION_FILE = ("quantization_config", "compression_config"), "hf_quant_config.json"
QUANTIZED = "quantized weights are not supported"


def check_config(config: Any, path: Path) -> None:
    """Raise CheckpointConfigError if the configuration (transformers') asks for something unsupported."""
    text = config.get_text_config(decoder=True)

    def refuse(name: str, why: str) -> CheckpointConfigError:
        return CheckpointConfigError(path, f"{name}: {why}; transformers' modules are used unchanged")

    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise refuse("is_encoder_decoder", "a decoder that also attends to an encoder is not supported")
    for name, part in {"": config, **{f"{each}.": getattr(config, each, None) for each in config.sub_configs}}.items():
        for field in _QUANTIZATION_FIELDS:
            if getattr(part, field, None) is not None:
                raise refuse(f"{name}{field}", QUANTIZED)
    if (beside := path.with_name(_QUANTIZATION_FILE)).exists():
        raise CheckpointConfigError(beside, f"{QUANTIZED}; transformers' modules are used unchanged")
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in _LAYER_TYPES:
            raise refuse("layer_types", f"{layer_type!r} is not supported, only {', '.join(_LAYER_TYPES)} are")
    if (seen := getattr(text, "use_bidirectional_attention", None)) not in (None, False, "vision"):
        raise refuse("use_bidirectional_attention", f"{seen!r}: tokens that see later ones are not supported")


def check_structure(model: Any, path: Path) -> None:
    """Raise CheckpointConfigError if the structure of transformers' model (with or without weights) is unsupported."""
    name, body = type(model).__name__, model.base_model

    def refuse(why: str) -> CheckpointConfigError:
        return CheckpointConfigError(path, f"architectures: transformers' {name} {why}")

    if body is model or not hasattr(body.get_decoder(), "set_attn_implementation"):
        raise refuse("has no decoder apart from its head")
    if not body.get_decoder()._can_set_attn_implementation():
        raise refuse("has its own attention (not transformers' AttentionInterface)")
    if getattr(model.config, "vision_config", None) is not None and not hasattr(body, "get_image_features"):
        raise refuse("encodes pictures in its own way (it has no get_image_features apart from its head)")
    if hasattr(body, "get_image_features") and find_media_token(model.config, "image") is None:
        raise CheckpointConfigError(path, "image_token_id: names no token, so what stands for a picture is unknown")
    check_all_are_read(body, path)
    decoder_takes = inspect.signature(body.get_decoder().forward).parameters
    if "deepstack_visual_embeds" in decoder_takes:
        raise refuse("adds to pictures' hidden states after several layers, which is not supported")
    if any(name.endswith("mm_token_type_ids") for name in decoder_takes):
        raise refuse("computes tokens of pictures differently from text, which is not supported")
    if uses_mrope(body) and not places_as_ours(body):
        raise refuse("places the tokens of pictures otherwise than by their rows and columns")
