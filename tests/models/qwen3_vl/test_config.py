"""How Qwen3-VL's config.json is read, in both of its layouts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.errors import CheckpointConfigError
from keepsight.models.decoder_config import MixtureConfig, RotaryConfig
from keepsight.models.qwen3_vl.config import Qwen3VLConfig
from tests.models.qwen3_vl.real_configs import MIXTURES, REAL_CONFIGS

PUBLISHED, MIXTURE = REAL_CONFIGS["4b"], MIXTURES["30b-a3b"]


def read(tmp_path: Path, fields: dict[str, Any]) -> Qwen3VLConfig:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return Qwen3VLConfig.from_checkpoint(tmp_path)


def changed(section: str, published: dict[str, Any] = PUBLISHED, **fields: Any) -> dict[str, Any]:
    return {**published, section: {**published[section], **fields}}


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


def test_fields_that_are_left_out_have_the_reference_s_defaults(tmp_path: Path) -> None:
    from transformers import Qwen3VLConfig as ReferenceConfig

    fields: Any = {"text_config": {"num_hidden_layers": 4}, "vision_config": {"out_hidden_size": 4096}}
    left_out = read(tmp_path, fields)
    ReferenceConfig(**fields).save_pretrained(tmp_path)
    assert Qwen3VLConfig.from_checkpoint(tmp_path) == left_out


def test_a_mixture_is_read_in_both_layouts(tmp_path: Path) -> None:
    from transformers import Qwen3VLMoeConfig

    layers = {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 8}
    fields: Any = changed("text_config", MIXTURE, **layers)
    config = read(tmp_path, fields)
    mixed = [index for index, layer in enumerate(config.text.layers) if layer.mixture]
    assert (mixed, config.text.layers[3].mixture) == ([3, 5, 7], MixtureConfig(128, 8, 768))
    assert read_as_saved(tmp_path, Qwen3VLMoeConfig(**fields)) == config


def test_fields_of_a_mixture_that_are_left_out_have_the_reference_s_defaults(tmp_path: Path) -> None:
    from transformers import Qwen3VLMoeConfig

    fields: Any = {"architectures": MIXTURE["architectures"], "vision_config": {"out_hidden_size": 2048}}
    assert read_as_saved(tmp_path, Qwen3VLMoeConfig(**fields)) == read(tmp_path, fields)


def read_as_saved(tmp_path: Path, reference: Any) -> Qwen3VLConfig:
    reference.save_pretrained(tmp_path)
    return Qwen3VLConfig.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**PUBLISHED, "quantization_config": {"quant_method": "hqq"}}, "'hqq' is not supported"),
        (changed("vision_config", in_channels=1), "in_channels: must be 3"),
        (changed("vision_config", temporal_patch_size=1), "temporal_patch_size: only 2 is supported"),
        (changed("vision_config", out_hidden_size=2048), "is 2048, but the decoder's is 2560"),
        (changed("vision_config", deepstack_visual_indexes=[5, 24]), "must name layers of 24 in ascending order"),
        (changed("vision_config", deepstack_visual_indexes=[5, 3]), "must name layers of 24 in ascending order"),
        (changed("vision_config", deepstack_visual_indexes="5"), "must be a list of some integers"),
        (changed("vision_config", num_heads=15), "1024 is not a multiple of 4 \\* num_heads 15"),
        (changed("text_config", num_hidden_layers=3), "names 3 layers, but what is behind"),
        (changed("text_config", rope_scaling={"rope_type": "yarn", "factor": 4}), "rope_type: must be one of"),
        (changed("text_config", rope_scaling={"mrope_section": [24, 20]}), "must be a list of 3 integers"),
        (changed("text_config", num_key_value_heads=7), "is not a multiple of num_key_value_heads 7"),
        (changed("text_config", MIXTURE, num_experts=4), "num_experts_per_tok: 8 exceeds the 4 experts"),
        (changed("text_config", MIXTURE, moe_intermediate_size=70), "must be a multiple of 8 in"),
        (changed("text_config", MIXTURE, moe_intermediate_size=2048), "hidden_size or half of it, as 2048 is"),
        (changed("text_config", MIXTURE, moe_intermediate_size=1024), "hidden_size or half of it, as 1024 is"),
    ],
)
def test_unknown_values_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointConfigError, match=message):
        read(tmp_path, fields)
