"""The published sizes need exactly the tensors that transformers' class has, under either of their names."""

import json
from pathlib import Path

import pytest
import torch

from keepsight.models.layers import Placement
from keepsight.models.qwen2_5_vl.config import Qwen25VLConfig
from keepsight.models.qwen2_5_vl.model import Qwen25VL
from keepsight.models.qwen_weight_names import canonical_name
from tests.models.judged import wanted_shapes
from tests.models.qwen2_5_vl.real_configs import REAL_CONFIGS


def reference_shapes(size: str) -> dict[str, tuple[int, ...]]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**REAL_CONFIGS[size]))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def name_as_published(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


@pytest.mark.parametrize("size", ["3b", "7b"])
def test_every_tensor_of_a_published_size_has_its_place(size: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL_CONFIGS[size]))
    model = Qwen25VL(Qwen25VLConfig.from_checkpoint(tmp_path), Placement(torch.device("meta"), torch.bfloat16))
    theirs = reference_shapes(size)
    if size == "3b":
        del theirs["lm_head.weight"]
    ours = wanted_shapes(model)
    assert ours == {canonical_name(name): shape for name, shape in theirs.items()}
    assert ours == {canonical_name(name_as_published(name)): shape for name, shape in theirs.items()}
    assert model.shape.media_width == model.config.text.hidden_size
