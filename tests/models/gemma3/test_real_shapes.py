"""The published sizes build without memory and need exactly the tensors that transformers' classes have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3Config as ReferenceConfig
from transformers import Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

from keepsight.models.gemma3.config import Gemma3Config
from keepsight.models.gemma3.model import Gemma3
from keepsight.models.gemma3.weight_names import canonical_name, is_never_read
from keepsight.models.layers import Placement
from tests.models.gemma3.real_configs import NUM_PARAMETERS, REAL_CONFIGS


def reference_shapes(values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model: Any
        if "text_config" in values:
            model = Gemma3ForConditionalGeneration(ReferenceConfig(**values))
        else:
            model = Gemma3ForCausalLM(Gemma3TextConfig(**values))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", REAL_CONFIGS)
def test_every_tensor_of_a_published_size_has_its_place(size: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIGS[size]))
    config = Gemma3Config.from_checkpoint(tmp_path)
    model = Gemma3(config, Placement(torch.device("meta"), torch.bfloat16))

    ours = {slot.name: slot.shape for slot in model.slots()}
    theirs = {canonical_name(name): shape for name, shape in reference_shapes(REAL_CONFIGS[size]).items()}
    if config.text.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert ours == {name: shape for name, shape in theirs.items() if not is_never_read(name, config)}
    assert sum(torch.Size(shape).numel() for shape in ours.values()) == NUM_PARAMETERS[size]
    assert sum(parameter.numel() for parameter in model.parameters()) == NUM_PARAMETERS[size]


def test_torch_s_default_precision_does_not_round_the_scale_of_embeddings(
    tmp_path: Path, set_default_dtype: Callable[[str], None]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIGS["4b"]))
    config = Gemma3Config.from_checkpoint(tmp_path)
    set_default_dtype("bfloat16")
    scale = Gemma3(config, Placement(torch.device("meta"), torch.float32)).decoder.embedding_scale
    assert scale == np.float32(config.text.hidden_size**0.5)


def test_local_and_global_layers_of_the_4b_model_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIGS["4b"]))
    layers = Gemma3Config.from_checkpoint(tmp_path).text.layers
    assert [index for index, layer in enumerate(layers) if layer.window is None] == [5, 11, 17, 23, 29]
    assert {layer.window for layer in layers} == {1024, None}
    assert (layers[0].rotary.theta, layers[0].rotary.scaling_factor) == (10_000.0, 1.0)
    assert (layers[5].rotary.theta, layers[5].rotary.scaling_factor) == (1_000_000.0, 8.0)
