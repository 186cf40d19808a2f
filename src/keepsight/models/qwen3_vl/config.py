"""Qwen3-VL's `config.json` as frozen values.

Published files omit values equal to the reference's defaults, so the defaults here are the reference's. Rotary bases
are in `rope_parameters` (new) or in `rope_theta` and `rope_scaling` (as published).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from keepsight.json_fields import JsonFields
from keepsight.models.decoder_config import (
    DecoderConfig,
    LayerConfig,
    MixtureConfig,
    RotaryConfig,
    check_heads,
    names_rotary_kind,
    read_rotary_kind,
)
from keepsight.models.layers import ACTIVATIONS
from keepsight.models.quantized_checkpoint import check_quantization
from keepsight.models.qwen_config import NORM_EPS, check_layer, check_out_size, check_patches, read_rotary_theta
from keepsight.models.vision_layer import VisionLayerConfig

MIXTURE = "Qwen3VLMoeForConditionalGeneration"
# Number of frequencies that rotate by time, row and column.
DEFAULT_SECTIONS = (24, 20, 20)


class _TextDefaults(NamedTuple):
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None  # None: as many as heads
    head_dim: int | None  # None: the heads share the hidden size


_OF_DENSE = _TextDefaults(4096, 22_016, 32, 32, None, 128)
_OF_MIXTURE = _TextDefaults(2048, 5632, 24, 16, 16, None)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    layer: VisionLayerConfig
    num_layers: int
    patch_size: int
    # A square of patches with this side becomes one token.
    merge_size: int
    # The learned position embeddings form a square with this side; they are interpolated for each picture's size.
    positions_per_side: int
    # Tower layers whose outputs are added in the decoder, after its first, second, ... layer (DeepStack).
    deep_layers: tuple[int, ...]
    out_size: int
    rotary_theta: float


@dataclass(frozen=True, slots=True)
class Qwen3VLConfig:
    text: DecoderConfig
    vision: VisionConfig

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "Qwen3VLConfig":
        fields = JsonFields.read(directory / "config.json")
        check_quantization(fields)
        text = _read_text(fields.section("text_config"), fields)
        of_vision = fields.section("vision_config")
        vision = read_vision(of_vision, _read_deep_layers(of_vision))
        check_out_size(fields, vision.out_size, text.hidden_size)
        if len(vision.deep_layers) >= len(text.layers):
            raise fields.refuse(
                "vision_config.deepstack_visual_indexes",
                f"names {len(vision.deep_layers)} layers, but what is behind the decoder's last of {len(text.layers)} "
                "is read by none",
            )
        return cls(text, vision)


def read_vision(fields: JsonFields, deep_layers: tuple[int, ...]) -> VisionConfig:
    check_patches(fields)
    return VisionConfig(
        layer=_read_vision_layer(fields),
        num_layers=fields.integer("depth", 27),
        patch_size=fields.integer("patch_size", 16),
        merge_size=fields.integer("spatial_merge_size", 2),
        positions_per_side=math.isqrt(fields.integer("num_position_embeddings", 2304)),
        deep_layers=deep_layers,
        out_size=fields.integer("out_hidden_size", 3584),
        rotary_theta=read_rotary_theta(fields),
    )


def _read_vision_layer(fields: JsonFields) -> VisionLayerConfig:
    layer = VisionLayerConfig(
        hidden_size=fields.integer("hidden_size", 1152),
        intermediate_size=fields.integer("intermediate_size", 4304),
        num_heads=fields.integer("num_heads", 16),
        norm_eps=NORM_EPS,
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh"),
        qkv_names=("qkv",),
    )
    check_layer(fields, layer)
    return layer


def _read_deep_layers(fields: JsonFields) -> tuple[int, ...]:
    depth = fields.integer("depth", 27)
    indexes = fields.indexes("deepstack_visual_indexes", (8, 16, 24))
    if sorted(set(indexes)) != list(indexes) or any(index >= depth for index in indexes):
        raise fields.refuse(
            "deepstack_visual_indexes", f"must name layers of {depth} in ascending order, not {list(indexes)}"
        )
    return indexes


def _read_text(fields: JsonFields, outer: JsonFields) -> DecoderConfig:
    is_mixture = MIXTURE in outer.strings("architectures")
    defaults = _OF_MIXTURE if is_mixture else _OF_DENSE
    hidden_size = fields.integer("hidden_size", defaults.hidden_size)
    num_heads = fields.integer("num_attention_heads", defaults.num_heads)
    head_dim = fields.integer("head_dim", defaults.head_dim or hidden_size // num_heads)
    num_layers = fields.integer("num_hidden_layers", defaults.num_layers)
    mixture = _read_mixture(fields, hidden_size) if is_mixture else None
    has_bias = fields.flag("attention_bias", False)
    config = DecoderConfig(
        vocab_size=fields.integer("vocab_size", 151_936),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", defaults.intermediate_size),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", defaults.num_kv_heads or num_heads),
        head_dim=head_dim,
        layers=tuple(_read_layers(fields, num_layers, _read_rotary(fields, head_dim), mixture)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        qkv_bias=has_bias,
        out_bias=has_bias,
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        # The value in the text's own section is ignored, as in the reference.
        tie_word_embeddings=outer.flag("tie_word_embeddings", False),
    )
    check_heads(fields, config)
    return config


def _read_layers(
    fields: JsonFields, num_layers: int, rotary: RotaryConfig, mixture: MixtureConfig | None
) -> Iterator[LayerConfig]:
    every, without = fields.integer("decoder_sparse_step", 1), fields.indexes("mlp_only_layers", ())
    for index in range(num_layers):
        is_mixed = index not in without and (index + 1) % every == 0
        yield LayerConfig(rotary, mixture=mixture if is_mixed else None)


def _read_mixture(fields: JsonFields, hidden_size: int) -> MixtureConfig:
    # As published, or as transformers 5 saves it.
    num_experts = fields.integer("num_experts", fields.integer("num_local_experts", 60))
    num_chosen = fields.integer("num_experts_per_tok", 4)
    if num_chosen > num_experts:
        raise fields.refuse("num_experts_per_tok", f"{num_chosen} exceeds the {num_experts} experts")
    wide = fields.integer("moe_intermediate_size", 1408)
    # The grouped product on a GPU needs rows that begin at multiples of 16 bytes.
    for name, size in (("hidden_size", hidden_size), ("moe_intermediate_size", wide)):
        if size % 8:
            raise fields.refuse(name, f"must be a multiple of 8 in models with experts, not {size}")
    if hidden_size in (wide, 2 * wide):
        # Some checkpoints have experts' matrices transposed, which those of a square do not show.
        raise fields.refuse("moe_intermediate_size", f"must not be hidden_size or half of it, as {wide} is")
    return MixtureConfig(num_experts, num_chosen, wide)


def _read_rotary(fields: JsonFields, head_dim: int) -> RotaryConfig:
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    read_rotary_kind(old if names_rotary_kind(old) else new, ("default", "mrope"))
    theta = new.number("rope_theta", old.number("rope_theta", fields.number("rope_theta", 500_000.0)))
    named = old if "mrope_section" in old else new
    _, rows, columns = named.indexes("mrope_section", DEFAULT_SECTIONS, length=3)
    # Interleaved, from the fastest frequency on.
    frequencies = range(head_dim // 2)
    return RotaryConfig(theta, by_row_and_column=(frequencies[1 : 3 * rows : 3], frequencies[2 : 3 * columns : 3]))
