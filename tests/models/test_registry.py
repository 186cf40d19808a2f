"""A folder becomes the model it claims to be, or an error that names the file."""

import json
from pathlib import Path

import pytest
import torch

from keepsight import demo
from keepsight.errors import CheckpointConfigError, CheckpointError, UnknownArchitectureError
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.layers import Placement
from keepsight.models.registry import load_model

PLACE = Placement(torch.device("cpu"), torch.float32)


def test_the_demo_checkpoint_is_a_gemma_3() -> None:
    model = load_model(demo.checkpoint_path(), PLACE)
    assert isinstance(model, Gemma3)
    assert model.shape.tokens_per_image == 16


def test_an_unknown_architecture_is_named_with_the_known_ones_where_only_our_models_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnknownArchitectureError, match=r"config\.json: .*LlamaForCausalLM.*Gemma3ForCausalLM"):
        load_model(tmp_path, PLACE, model_impl="keepsight")


def test_an_architecture_of_neither_ours_nor_transformers_is_named(tmp_path: Path) -> None:
    for name in ("NobodysForCausalLM", "LlamaModel", "logging"):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        with pytest.raises(
            UnknownArchitectureError, match=rf"config\.json: .*{name}.*transformers \d.* with none of them"
        ):
            load_model(tmp_path, PLACE)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        load_model(tmp_path / "nowhere", PLACE)


def test_a_folder_that_cannot_be_looked_into_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, reason in (("loop", "Too many levels"), ("long" * 100, "File name too long")):
        with pytest.raises(CheckpointError, match=f"{name}: cannot be accessed: {reason}"):
            load_model(tmp_path / name, PLACE)


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_a_broken_config_json_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointConfigError, match=r"config\.json"):
        load_model(tmp_path, PLACE)
