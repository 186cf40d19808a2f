"""Gemma 3's `config.json` as frozen values.

Published files omit values equal to the reference's defaults, so the defaults here are the reference's. Both ways of
giving layer types (`layer_types`, `sliding_window_pattern`) and rotary bases (`rope_parameters`, `rope_theta` with
`rope_scaling` and `rope_local_base_freq`) result in the same `LayerConfig`s.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from keepsight.json_fields import JsonFields
from keepsight.models.decoder_config import (
    DecoderConfig,
    LayerConfig,
    RotaryConfig,
    check_heads,
    names_rotary_kind,
    read_rotary_kind,
)
from keepsight.models.layers import ACTIVATIONS
from keepsight.models.quantized_checkpoint import check_quantization
from keepsight.models.vision_layer import VisionLayerConfig

LAYER_TYPES = ("sliding_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class VisionConfig:
    layer: VisionLayerConfig
    num_layers: int
    image_size: int
    patch_size: int
    # A pooling head that Gemma 3 never calls; its weights may be in the checkpoint.
    has_unused_head: bool

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True)
class Gemma3Config:
    text: DecoderConfig
    vision: VisionConfig | None
    # Embeddings of one picture, and so its positions in the prompt.
    tokens_per_image: int

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "Gemma3Config":
        fields = JsonFields.read(directory / "config.json")
        check_quantization(fields)
        # Some models that take pictures are saved under the text-only name, too.
        if "Gemma3ForCausalLM" in fields.strings("architectures") and "text_config" not in fields:
            return cls(text=_read_text(fields, fields), vision=None, tokens_per_image=0)
        vision = _read_vision(fields.section("vision_config"))
        return cls(
            text=_read_text(fields.section("text_config"), fields),
            vision=vision,
            tokens_per_image=_read_tokens_per_image(fields, vision),
        )


def _read_tokens_per_image(fields: JsonFields, vision: VisionConfig) -> int:
    num_tokens = fields.integer("mm_tokens_per_image", 256)
    side = math.isqrt(num_tokens)
    if side * side != num_tokens or vision.patches_per_side % side:
        raise fields.refuse(
            "mm_tokens_per_image",
            f"must be a square whose side divides the {vision.patches_per_side} patches of a picture's side, "
            f"not {num_tokens}",
        )
    return num_tokens


def _read_vision(fields: JsonFields) -> VisionConfig:
    fields.choice("model_type", ("siglip_vision_model",), "siglip_vision_model")
    if (num_channels := fields.integer("num_channels", 3)) != 3:
        raise fields.refuse("num_channels", f"must be 3, not {num_channels}: pictures are RGB")
    layer = VisionLayerConfig(
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_heads=fields.integer("num_attention_heads", 12),
        norm_eps=fields.number("layer_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        qkv_names=("q_proj", "k_proj", "v_proj"),
    )
    if layer.hidden_size % layer.num_heads:
        message = f"{layer.hidden_size} is not a multiple of num_attention_heads {layer.num_heads}"
        raise fields.refuse("hidden_size", message)
    config = VisionConfig(
        layer,
        num_layers=fields.integer("num_hidden_layers", 12),
        image_size=fields.integer("image_size", 224),
        patch_size=fields.integer("patch_size", 16),
        has_unused_head=fields.flag("vision_use_head", True),
    )
    if config.image_size < config.patch_size:
        raise fields.refuse("patch_size", f"{config.patch_size} exceeds image_size {config.image_size}")
    return config


def _read_text(fields: JsonFields, outer: JsonFields) -> DecoderConfig:
    if fields.flag("use_bidirectional_attention", False):
        raise fields.refuse(
            "use_bidirectional_attention", "is set: this is an embedding model, which generates no text"
        )
    hidden_size = fields.integer("hidden_size", 2304)
    has_bias = fields.flag("attention_bias", False)
    config = DecoderConfig(
        vocab_size=fields.integer("vocab_size", 262_208),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 9216),
        num_heads=fields.integer("num_attention_heads", 8),
        num_kv_heads=fields.integer("num_key_value_heads", 4),
        head_dim=fields.integer("head_dim", 256),
        layers=_read_layers(fields),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=has_bias,
        out_bias=has_bias,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        final_softcap=fields.optional_number("final_logit_softcapping"),
        activation=fields.choice("hidden_activation", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        # If both are given, the outer value decides, as in the reference.
        tie_word_embeddings=outer.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", True)),
        embedding_scale=hidden_size**0.5,
        norms_results=True,
        norms_add_one=True,
    )
    check_heads(fields, config)
    return config


def _read_layers(fields: JsonFields) -> tuple[LayerConfig, ...]:
    num_layers = fields.integer("num_hidden_layers", 26)
    layer_types = _read_layer_types(fields, num_layers)
    by_type = {
        "sliding_attention": LayerConfig(
            _read_rotary(fields, "sliding_attention", "rope_local_base_freq", 10_000.0),
            fields.integer("sliding_window", 4096),
        ),
        "full_attention": LayerConfig(_read_rotary(fields, "full_attention", "rope_theta", 1_000_000.0), None),
    }
    return tuple(by_type[layer_type] for layer_type in layer_types)


def _read_layer_types(fields: JsonFields, num_layers: int) -> tuple[str, ...]:
    if "layer_types" not in fields:
        # Every pattern-th layer has full attention, the others the window.
        pattern = fields.integer("sliding_window_pattern", 6)
        return tuple(LAYER_TYPES[(index + 1) % pattern == 0] for index in range(num_layers))
    layer_types = fields.strings("layer_types")
    if len(layer_types) != num_layers:
        raise fields.refuse("layer_types", f"names {len(layer_types)} layers, but num_hidden_layers is {num_layers}")
    for layer_type in layer_types:
        if layer_type not in LAYER_TYPES:
            raise fields.refuse("layer_types", f"{layer_type!r} is not one of {', '.join(LAYER_TYPES)}")
    return layer_types


def _read_rotary(fields: JsonFields, layer_type: str, old_theta_name: str, default_theta: float) -> RotaryConfig:
    new = fields.section("rope_parameters").section(layer_type)
    # The old layout scales the global layers only. If there are both, it takes precedence, as in the reference.
    old = fields.section("rope_scaling") if layer_type == "full_attention" else JsonFields(fields.path, {})
    theta = old.number("rope_theta", new.number("rope_theta", fields.number(old_theta_name, default_theta)))
    scaling = old if names_rotary_kind(old) else new
    if read_rotary_kind(scaling, ("default", "linear")) == "default":
        return RotaryConfig(theta)
    return RotaryConfig(theta, (old if "factor" in old else scaling).number("factor"))
