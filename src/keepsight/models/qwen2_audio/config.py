"""Qwen2-Audio's `config.json` as frozen values. Missing fields have the reference's defaults."""

from dataclasses import dataclass
from pathlib import Path

from keepsight.json_fields import JsonFields
from keepsight.models.decoder_config import DecoderConfig, RotaryConfig
from keepsight.models.layers import ACTIVATIONS
from keepsight.models.quantized_checkpoint import check_quantization
from keepsight.models.qwen2_text_config import TextDefaults, read_text, read_theta, rotary_section
from keepsight.models.vision_layer import VisionLayerConfig

DEFAULTS = TextDefaults(151_936, 4096, 22_016, 32, 32, 32, 1e-6)
NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class AudioConfig:
    layer: VisionLayerConfig
    num_layers: int
    num_mels: int
    # Places of the longest sound.
    num_places: int


@dataclass(frozen=True, slots=True)
class Qwen2AudioConfig:
    text: DecoderConfig
    audio: AudioConfig

    @classmethod
    def from_checkpoint(cls, directory: Path) -> "Qwen2AudioConfig":
        fields = JsonFields.read(directory / "config.json")
        check_quantization(fields)
        text = fields.section("text_config")
        rotary = RotaryConfig(read_theta(text, rotary_section(text, ("default",)), 10_000.0))
        # The head is never tied, whatever files say, as in the reference.
        decoder = read_text(text, DEFAULTS, rotary, ties_embeddings=False)
        return cls(decoder, _read_audio(fields.section("audio_config")))


def _read_audio(fields: JsonFields) -> AudioConfig:
    return AudioConfig(
        layer=_read_layer(fields),
        num_layers=fields.integer("encoder_layers", 32),
        num_mels=fields.integer("num_mel_bins", 128),
        num_places=fields.integer("max_source_positions", 1500),
    )


def _read_layer(fields: JsonFields) -> VisionLayerConfig:
    layer = VisionLayerConfig(
        hidden_size=fields.integer("d_model", 1280),
        intermediate_size=fields.integer("encoder_ffn_dim", 5120),
        num_heads=fields.integer("encoder_attention_heads", 20),
        norm_eps=NORM_EPS,
        activation=fields.choice("activation_function", tuple(ACTIVATIONS), "gelu"),
        qkv_names=("q_proj", "k_proj", "v_proj"),
        unbiased=("k_proj",),
    )
    if layer.hidden_size % layer.num_heads:
        message = f"{layer.hidden_size} is not a multiple of encoder_attention_heads {layer.num_heads}"
        raise fields.refuse("d_model", message)
    return layer
