"""How Qwen2.5-VL's config.json is read, in all of its layouts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import CheckpointConfigError
from keepsight.models.decoder_config import RotaryConfig
from keepsight.models.qwen2_5_vl.config import Qwen25VLConfig
from tests.models.qwen2_5_vl.real_configs import REAL_CONFIGS

PUBLISHED = REAL_CONFIGS["3b"]


def read(tmp_path: Path, fields: dict[str, Any]) -> Qwen25VLConfig:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return Qwen25VLConfig.from_checkpoint(tmp_path)


def changed(**fields: Any) -> dict[str, Any]:
    return {**PUBLISHED, **fields}


def changed_tower(**fields: Any) -> dict[str, Any]:
    return changed(vision_config={**PUBLISHED["vision_config"], **fields})


def save_anew(directory: Path, fields: dict[str, Any]) -> Qwen25VLConfig:
    """Save the configuration with transformers and read it again."""
    from transformers import Qwen2_5_VLConfig

    Qwen2_5_VLConfig(**fields).save_pretrained(directory)
    return Qwen25VLConfig.from_checkpoint(directory)


def test_the_published_layout_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    text, vision = config.text, config.vision
    assert text.layers[0].rotary == RotaryConfig(1e6, by_row_and_column=(range(16, 40), range(40, 64)))
    assert (len(text.layers), text.head_dim, text.tie_word_embeddings, text.rms_norm_eps) == (36, 128, True, 1e-6)
    assert (vision.whole_layers, vision.num_layers, vision.window_side) == (frozenset({7, 15, 23, 31}), 32, 4)
    assert (vision.patch_size, vision.merge_size, vision.out_size) == (14, 2, 2048)


@pytest.mark.parametrize("size", REAL_CONFIGS)
def test_transformers_own_layout_is_read_likewise(size: str, tmp_path: Path) -> None:
    assert save_anew(tmp_path, REAL_CONFIGS[size]) == read(tmp_path, REAL_CONFIGS[size])


def test_a_layout_that_repeats_the_decoder_s_fields_is_read_too(tmp_path: Path) -> None:
    """As versions in between wrote it; the section takes precedence."""
    section = {name: value for name, value in PUBLISHED.items() if name != "vision_config"}
    fields = changed(text_config=section, hidden_size=64, tie_word_embeddings=False)
    assert read(tmp_path, fields) == read(tmp_path, PUBLISHED) == save_anew(tmp_path, fields)


def test_fields_that_are_left_out_have_the_reference_s_defaults(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"num_hidden_layers": 4, "vision_config": {"out_hidden_size": 8192}}
    assert save_anew(tmp_path, fields) == read(tmp_path, fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (changed(quantization_config={"quant_method": "hqq"}), "'hqq' is not supported"),
        (changed(use_sliding_window=True), "use_sliding_window: windows of the decoder are not supported"),
        (changed(layer_types=["sliding_attention"] * 36), "layer_types: only full_attention is supported"),
        (changed(rope_scaling={"type": "yarn", "mrope_section": [16, 24, 24]}), "type: must be one of default, mrope"),
        (changed(rope_scaling={"mrope_section": [24, 20, 19]}), "mrope_section: must be 64 frequencies together"),
        (changed(num_attention_heads=15), "hidden_size: 2048 is not a multiple of num_attention_heads 15"),
        (changed_tower(out_hidden_size=64), "out_hidden_size: is 64, but the decoder's is 2048"),
        (changed_tower(temporal_patch_size=1), "temporal_patch_size: only 2 is supported"),
        (changed_tower(window_size=27), "window_size: is 27 pixels, but a token's side is 28"),
        (changed_tower(num_heads=15), "1280 is not a multiple of 4 \\* num_heads 15"),
    ],
)
def test_unknown_values_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointConfigError, match=message):
        read(tmp_path, fields)
