"""The published sizes need exactly the tensors that transformers' classes have; nothing is allocated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.models.layers import Placement
from keepsight.models.qwen3_vl.config import Qwen3VLConfig
from keepsight.models.qwen3_vl.model import Qwen3VL
from keepsight.models.qwen_weight_names import canonical_name
from tests.models.judged import wanted_shapes
from tests.models.qwen3_vl.real_configs import MIXTURES, REAL_CONFIGS

ALL_CONFIGS = REAL_CONFIGS | MIXTURES


def reference_shapes(size: str) -> dict[str, tuple[int, ...]]:
    from transformers import AutoConfig, AutoModelForImageTextToText

    make: Any = AutoModelForImageTextToText.from_config
    with torch.device("meta"):
        model = make(AutoConfig.for_model(**ALL_CONFIGS[size]))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", ALL_CONFIGS)
def test_every_tensor_of_a_published_size_has_its_place(size: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ALL_CONFIGS[size]))
    config = Qwen3VLConfig.from_checkpoint(tmp_path)
    model = Qwen3VL(config, Placement(torch.device("meta"), torch.bfloat16))
    theirs = {canonical_name(name): shape for name, shape in reference_shapes(size).items()}
    if config.text.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert wanted_shapes(model) == theirs
    assert model.shape.media_width == 4 * config.text.hidden_size
