"""Qwen2.5-VL's `config.json` as frozen values.

Missing fields have the reference's defaults. The decoder's fields are at the top level in published files, and in
`text_config` if saved again; rotary fields are in `rope_scaling` and `rope_theta`, or in `rope_parameters`.
"""

from dataclasses import dataclass
from pathlib import Path

from keepsight.json_fields import JsonFields
from keepsight.models.decoder_config import DecoderConfig, RotaryConfig
from keepsight.models.layers import ACTIVATIONS
from keepsight.models.quantized_checkpoint import check_quantization
from keepsight.models.qwen2_text_config import TextDefaults, read_head_dim, read_text, read_theta, rotary_section
from keepsight.models.qwen_config import NORM_EPS, check_layer, check_out_size, check_patches, read_rotary_theta
from keepsight.models.vision_layer import VisionLayerConfig

# Number of frequencies that rotate by time, row and column.
DEFAULT_SECTIONS = (16, 24, 24)
DEFAULTS = TextDefaults(152_064, 8192, 29_568, 80, 64, 8, 1e-5)


@dataclass(frozen=True, slots=True)
class VisionConfig:
    layer: VisionLayerConfig
    num_layers: int
    patch_size: int
    # A square of patches with this side becomes one token.
    merge_size: int
    # The side of a window, in tokens; the patches of a window see each other.
    window_side: int
    # In these layers all patches of a picture see each other.
    whole_layers: frozenset[int]
    out_size: int
    rotary_theta: float


@dataclass(frozen=True, slots=True)
class Qwen25VLConfig:
    text: DecoderConfig
    vision: VisionConfig

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "Qwen25VLConfig":
        fields = JsonFields.read(directory / "config.json")
        check_quantization(fields)
        text = _read_text(fields.section("text_config") if "text_config" in fields else fields, fields)
        vision = _read_vision(fields.section("vision_config"))
        check_out_size(fields, vision.out_size, text.hidden_size)
        return cls(text, vision)


def _read_vision(fields: JsonFields) -> VisionConfig:
    check_patches(fields)
    patch_size, merge_size = fields.integer("patch_size", 14), fields.integer("spatial_merge_size", 2)
    return VisionConfig(
        layer=_read_vision_layer(fields),
        num_layers=fields.integer("depth", 32),
        patch_size=patch_size,
        merge_size=merge_size,
        window_side=_read_window_side(fields, patch_size * merge_size),
        whole_layers=frozenset(fields.indexes("fullatt_block_indexes", (7, 15, 23, 31))),
        out_size=fields.integer("out_hidden_size", 3584),
        rotary_theta=read_rotary_theta(fields),
    )


def _read_vision_layer(fields: JsonFields) -> VisionLayerConfig:
    layer = VisionLayerConfig(
        hidden_size=fields.integer("hidden_size", 3584),
        intermediate_size=fields.integer("intermediate_size", 3420),
        num_heads=fields.integer("num_heads", 16),
        norm_eps=NORM_EPS,
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        qkv_names=("qkv",),
        norms="rms",
        has_gate=True,
    )
    check_layer(fields, layer)
    return layer


def _read_window_side(fields: JsonFields, token_side: int) -> int:
    window_size = fields.integer("window_size", 112)
    if window_size < token_side:
        raise fields.refuse("window_size", f"is {window_size} pixels, but a token's side is {token_side}")
    return window_size // token_side


def _read_text(fields: JsonFields, outer: JsonFields) -> DecoderConfig:
    rotary = _read_rotary(fields, read_head_dim(fields, DEFAULTS))
    # Tied if either place says so, as in the reference.
    ties = any(each.flag("tie_word_embeddings", False) for each in (outer, fields))
    return read_text(fields, DEFAULTS, rotary, ties_embeddings=ties)


def _read_rotary(fields: JsonFields, head_dim: int) -> RotaryConfig:
    section = rotary_section(fields, ("default", "mrope"))
    theta = read_theta(fields, section, 1_000_000.0)
    sections = section.indexes("mrope_section", DEFAULT_SECTIONS, length=3)
    if sum(sections) != head_dim // 2:
        raise section.refuse("mrope_section", f"must be {head_dim // 2} frequencies together, not {list(sections)}")
    times, rows, _ = sections
    frequencies = range(head_dim // 2)
    return RotaryConfig(theta, by_row_and_column=(frequencies[times : times + rows], frequencies[times + rows :]))
