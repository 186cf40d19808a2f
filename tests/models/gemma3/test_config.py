"""Rotary positions and layer types are read from a configuration as transformers reads them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from keepsight.demo import checkpoint_path
from keepsight.models.gemma3.config import Gemma3Config

LINEAR = {"rope_type": "linear", "factor": 8.0}
NEW = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
}
ROTARY_FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "old": {"rope_scaling": LINEAR, "rope_theta": 5e4, "rope_local_base_freq": 500.0},
    "old, with the base among the scaling": {"rope_scaling": {**LINEAR, "rope_theta": 777.0}, "rope_theta": 5e4},
    "new": {"rope_parameters": NEW},
    "new, with old bases": {"rope_parameters": {"full_attention": LINEAR}, "rope_local_base_freq": 500.0},
    "both": {"rope_parameters": NEW, "rope_scaling": LINEAR},
    "both, of which the old undoes the new": {"rope_parameters": NEW, "rope_scaling": {"rope_type": "default"}},
    "both, of which the old says only a factor": {"rope_parameters": NEW, "rope_scaling": {"factor": 2.0}},
}


@pytest.mark.parametrize("case", ROTARY_FIELDS)
def test_rotary_positions_are_scaled_as_by_transformers(case: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2, **ROTARY_FIELDS[case]}
    values["layer_types"] = ["sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    layers = Gemma3Config.from_checkpoint(tmp_path).text.layers
    reference: dict[str, Any] = Gemma3TextConfig(**copy.deepcopy(values)).rope_parameters or {}
    for layer, name in zip(layers, ("sliding_attention", "full_attention"), strict=True):
        expected = reference[name]
        is_scaled = expected["rope_type"] == "linear"
        assert layer.rotary.theta == expected["rope_theta"]
        assert layer.rotary.scaling_factor == (expected["factor"] if is_scaled else 1.0)


def test_scaling_by_its_older_name_counts_though_transformers_misses_it(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    values = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, **scaling}
    (tmp_path / "config.json").write_text(json.dumps(values))
    layers = Gemma3Config.from_checkpoint(tmp_path).text.layers
    assert [layer.rotary.scaling_factor for layer in layers] == [1.0] * 5 + [8.0]
    reference: Any = Gemma3TextConfig(**copy.deepcopy(scaling)).rope_parameters
    assert reference["full_attention"]["rope_type"] == "default"


def test_a_model_that_reads_pictures_is_read_whole_under_the_text_model_s_name(tmp_path: Path) -> None:
    values = json.loads((checkpoint_path() / "config.json").read_text())
    read = []
    for architectures in (["Gemma3ForConditionalGeneration"], ["Gemma3ForCausalLM"]):
        (tmp_path / "config.json").write_text(json.dumps(values | {"architectures": architectures}))
        read.append(Gemma3Config.from_checkpoint(tmp_path))
    assert read[0] == read[1]
    assert read[1].vision is not None


@pytest.mark.parametrize("fields", [{}, {"sliding_window_pattern": 3}, {"_sliding_window_pattern": 3}], ids=str)
def test_layers_look_as_far_as_by_transformers(fields: dict[str, Any], tmp_path: Path) -> None:
    values: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, **fields}
    (tmp_path / "config.json").write_text(json.dumps(values))
    layers = Gemma3Config.from_checkpoint(tmp_path).text.layers
    ours = ["full_attention" if layer.window is None else "sliding_attention" for layer in layers]
    assert ours == Gemma3TextConfig(**values).layer_types
