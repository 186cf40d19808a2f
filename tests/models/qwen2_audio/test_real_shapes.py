"""The published size needs exactly the tensors that transformers' class has, under either of their names."""

import json
from pathlib import Path
from typing import Any

import torch

from keepsight.models.layers import Placement
from keepsight.models.qwen2_audio.config import Qwen2AudioConfig
from keepsight.models.qwen2_audio.model import Qwen2Audio
from keepsight.models.qwen_weight_names import canonical_name
from tests.models.judged import wanted_shapes
from tests.models.qwen2_audio.real_configs import PUBLISHED


def reference_shapes() -> dict[str, tuple[int, ...]]:
    from transformers import Qwen2AudioConfig as ReferenceConfig
    from transformers import Qwen2AudioForConditionalGeneration

    config: Any = ReferenceConfig
    with torch.device("meta"):
        model = Qwen2AudioForConditionalGeneration(config(**PUBLISHED))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def name_as_published(name: str) -> str:
    for own, published in (("lm_head.", "language_model.lm_head."), ("model.language_model.", "language_model.model.")):
        if name.startswith(own):
            return published + name.removeprefix(own)
    return name.removeprefix("model.")


def test_every_tensor_of_the_published_size_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = Qwen2AudioConfig.from_checkpoint(tmp_path)
    model, theirs = Qwen2Audio(config, Placement(torch.device("meta"), torch.bfloat16)), reference_shapes()
    # Zeros stand for the keys' missing bias, so that one product makes them with queries and values.
    ours = wanted_shapes(model, num_zeros=config.audio.num_layers * config.audio.layer.hidden_size)
    assert ours == {canonical_name(name): shape for name, shape in theirs.items()}
    assert ours == {canonical_name(name_as_published(name)): shape for name, shape in theirs.items()}
    assert "language_model.model.embed_tokens.weight" in map(name_as_published, theirs)
    # The name with which transformers 5.17 saves it.
    assert canonical_name("language_model.model.model.norm.weight") == "decoder.norm.weight"
    assert model.shape.media_width == model.config.text.hidden_size
