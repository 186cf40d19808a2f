"""Reads the Qwen2 decoder, which several models use, from `config.json`; the rotary settings are given."""

from typing import NamedTuple

from keepsight.json_fields import JsonFields
from keepsight.models.decoder_config import DecoderConfig, LayerConfig, RotaryConfig, check_heads, read_rotary_kind
from keepsight.models.layers import ACTIVATIONS


class TextDefaults(NamedTuple):
    """The defaults of the reference, which differ between models."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rms_norm_eps: float


def read_head_dim(fields: JsonFields, default: TextDefaults) -> int:
    hidden_size = fields.integer("hidden_size", default.hidden_size)
    num_heads = fields.integer("num_attention_heads", default.num_heads)
    if hidden_size % num_heads:
        raise fields.refuse("hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}")
    return hidden_size // num_heads


def read_text(
    fields: JsonFields, default: TextDefaults, rotary: RotaryConfig, *, ties_embeddings: bool
) -> DecoderConfig:
    _check_sees_all(fields)
    head_dim = read_head_dim(fields, default)
    config = DecoderConfig(
        vocab_size=fields.integer("vocab_size", default.vocab_size),
        hidden_size=fields.integer("hidden_size", default.hidden_size),
        intermediate_size=fields.integer("intermediate_size", default.intermediate_size),
        num_heads=fields.integer("num_attention_heads", default.num_heads),
        num_kv_heads=fields.integer("num_key_value_heads", default.num_kv_heads),
        head_dim=head_dim,
        layers=(LayerConfig(rotary),) * fields.integer("num_hidden_layers", default.num_layers),
        rms_norm_eps=fields.number("rms_norm_eps", default.rms_norm_eps),
        attention_scale=head_dim**-0.5,
        qkv_bias=True,
        out_bias=False,
        activation=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
        tie_word_embeddings=ties_embeddings,
        norms_heads=False,
    )
    check_heads(fields, config)
    return config


def _check_sees_all(fields: JsonFields) -> None:
    """Refuse windows that are in use; published files also contain unused settings for them."""
    if fields.flag("use_sliding_window", False):
        raise fields.refuse("use_sliding_window", "windows of the decoder are not supported")
    if others := set(fields.strings("layer_types")) - {"full_attention"}:
        raise fields.refuse("layer_types", f"only full_attention is supported, not {', '.join(sorted(others))}")


def rotary_section(fields: JsonFields, kinds: tuple[str, ...]) -> JsonFields:
    """Return the rotary section, by its name in older files or in newer ones; empty if there is none."""
    section = fields.section("rope_scaling" if "rope_scaling" in fields else "rope_parameters")
    read_rotary_kind(section, kinds)
    return section


def read_theta(fields: JsonFields, section: JsonFields, default: float) -> float:
    return section.number("rope_theta", fields.number("rope_theta", default))
