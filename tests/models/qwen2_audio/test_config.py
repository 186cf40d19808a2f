"""How Qwen2-Audio's config.json is read, in both of its layouts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import CheckpointConfigError
from keepsight.models.decoder_config import RotaryConfig
from keepsight.models.qwen2_audio.config import Qwen2AudioConfig
from tests.models.qwen2_audio.real_configs import PUBLISHED


def read(tmp_path: Path, fields: dict[str, Any]) -> Qwen2AudioConfig:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return Qwen2AudioConfig.from_checkpoint(tmp_path)


def changed(section: str, **fields: Any) -> dict[str, Any]:
    return {**PUBLISHED, section: {**PUBLISHED[section], **fields}}


def save_anew(directory: Path, fields: dict[str, Any]) -> Qwen2AudioConfig:
    """Save the configuration with transformers and read it again."""
    from transformers import Qwen2AudioConfig as ReferenceConfig

    config: Any = ReferenceConfig
    config(**fields).save_pretrained(directory)
    return Qwen2AudioConfig.from_checkpoint(directory)


def test_the_published_layout_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    text, audio = config.text, config.audio
    assert text.layers == (text.layers[0],) * 32
    assert text.layers[0].rotary == RotaryConfig(10_000.0)
    assert (text.hidden_size, text.intermediate_size, text.num_kv_heads, text.rms_norm_eps) == (4096, 11_008, 32, 1e-5)
    assert (text.vocab_size, text.tie_word_embeddings) == (156_032, False)
    assert (audio.num_layers, audio.num_mels, audio.num_places, audio.layer.head_dim) == (32, 128, 1500, 64)


@pytest.mark.parametrize("fields", [PUBLISHED, changed("text_config", tie_word_embeddings=True), {}], ids=range(3))
def test_transformers_own_layout_is_read_likewise_and_defaults_are_its_own(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    assert save_anew(tmp_path, fields) == read(tmp_path, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**PUBLISHED, "quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported"),
        (changed("text_config", use_sliding_window=True), "use_sliding_window: windows of the decoder"),
        (changed("text_config", rope_scaling={"type": "yarn"}), "type: must be one of default, not 'yarn'"),
        (changed("audio_config", activation_function="relu"), "activation_function: must be one of gelu_pytorch_tanh"),
        (
            changed("audio_config", encoder_attention_heads=3),
            "d_model: 1280 is not a multiple of encoder_attention_heads",
        ),
    ],
)
def test_unknown_values_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointConfigError, match=message):
        read(tmp_path, fields)
