"""The common fields of Qwen's vision towers in `config.json`."""

from keepsight.json_fields import JsonFields
from keepsight.media import FRAMES_PER_MOMENT
from keepsight.models.vision_layer import VisionLayerConfig

NORM_EPS = 1e-6


def check_patches(fields: JsonFields) -> None:
    if fields.integer("in_channels", 3) != 3:
        raise fields.refuse("in_channels", "must be 3, as pictures are RGB")
    if fields.integer("temporal_patch_size", FRAMES_PER_MOMENT) != FRAMES_PER_MOMENT:
        raise fields.refuse("temporal_patch_size", f"only {FRAMES_PER_MOMENT} is supported")


def check_layer(fields: JsonFields, layer: VisionLayerConfig) -> None:
    """Check the size of heads: their elements rotate in pairs, half of them by rows and half by columns."""
    if layer.hidden_size % layer.num_heads or layer.head_dim % 4:
        raise fields.refuse("hidden_size", f"{layer.hidden_size} is not a multiple of 4 * num_heads {layer.num_heads}")


def read_rotary_theta(fields: JsonFields) -> float:
    rotary = fields.section("rope_parameters")
    rotary.choice("rope_type", ("axial", "default"), "axial")
    return rotary.number("rope_theta", 10_000.0)


def check_out_size(fields: JsonFields, out_size: int, hidden_size: int) -> None:
    """Check that the tower's output is as wide as the decoder. `fields`: the whole file."""
    if out_size != hidden_size:
        raise fields.refuse("vision_config.out_hidden_size", f"is {out_size}, but the decoder's is {hidden_size}")
