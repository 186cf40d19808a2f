"""What is read of Qwen3-VL's config.json, in both of its layouts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import CheckpointConfigError
from keepsight.models.decoder_config import RotaryConfig
from keepsight.models.qwen3_vl.config import Qwen3VLConfig
from tests.models.qwen3_vl.real_configs import REAL_CONFIGS

PUBLISHED = REAL_CONFIGS["4b"]


def read(tmp_path: Path, fields: dict[str, Any]) -> Qwen3VLConfig:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return Qwen3VLConfig.from_checkpoint(tmp_path)


def changed(section: str, **fields: Any) -> dict[str, Any]:
    return {**PUBLISHED, section: {**PUBLISHED[section], **fields}}


def test_the_published_layout_is_read(tmp_path: Path) -> None:
    config = read(tmp_path, PUBLISHED)
    assert config.text.layers[0].rotary == RotaryConfig(5e6, by_row_and_column=(range(1, 60, 3), range(2, 60, 3)))
    assert (len(config.text.layers), config.text.head_dim, config.text.tie_word_embeddings) == (36, 128, True)
    vision = config.vision
    assert (vision.deep_layers, vision.num_layers, vision.positions_per_side) == ((5, 11, 17), 24, 48)
    assert (vision.patch_size, vision.merge_size, vision.out_size) == (16, 2, 2560)


def test_transformers_own_layout_is_read_likewise(tmp_path: Path) -> None:
    from transformers import Qwen3VLConfig as ReferenceConfig

    published = read(tmp_path, PUBLISHED)
    values: Any = {name: value for name, value in PUBLISHED.items() if name != "architectures"}
    ReferenceConfig(**values).save_pretrained(tmp_path)
    assert Qwen3VLConfig.from_checkpoint(tmp_path) == published


def test_what_is_left_out_is_the_reference_s_default(tmp_path: Path) -> None:
    from transformers import Qwen3VLConfig as ReferenceConfig

    fields: Any = {"text_config": {"num_hidden_layers": 4}, "vision_config": {"out_hidden_size": 4096}}
    left_out = read(tmp_path, fields)
    ReferenceConfig(**fields).save_pretrained(tmp_path)
    assert Qwen3VLConfig.from_checkpoint(tmp_path) == left_out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**PUBLISHED, "quantization_config": {"quant_method": "fp8"}}, "quantized weights are not supported"),
        (changed("vision_config", in_channels=1), "in_channels: pictures are RGB"),
        (changed("vision_config", temporal_patch_size=1), "temporal_patch_size: only 2 is supported"),
        (changed("vision_config", out_hidden_size=2048), "is 2048, but the decoder's is 2560"),
        (changed("vision_config", deepstack_visual_indexes=[5, 24]), "must name layers of 24, ascending"),
        (changed("vision_config", deepstack_visual_indexes=[5, 3]), "must name layers of 24, ascending"),
        (changed("vision_config", deepstack_visual_indexes="5"), "must be a list of some integers"),
        (changed("vision_config", num_heads=15), "1024 is no multiple of 4 \\* num_heads 15"),
        (changed("text_config", num_hidden_layers=3), "names 3 layers, but what is behind"),
        (changed("text_config", rope_scaling={"rope_type": "yarn", "factor": 4}), "rope_type: must be one of"),
        (changed("text_config", rope_scaling={"mrope_section": [24, 20]}), "must be a list of 3 integers"),
        (changed("text_config", num_key_value_heads=7), "is not a multiple of num_key_value_heads 7"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointConfigError, match=message):
        read(tmp_path, fields)
