"""Media that a checkpoint accepts; its two files must agree on the size of pictures."""

import json
from pathlib import Path
from typing import Any

import pytest

from keepsight.demo import checkpoint_path
from keepsight.errors import CheckpointConfigError, InvalidArgumentError
from keepsight.processor_config import ProcessorConfig
from tests.frontend.qwen_like import PROCESSOR, VISION, build_qwen_like_checkpoint


def test_a_tower_for_pictures_of_many_sizes_agrees_with_its_processor(tmp_path: Path) -> None:
    build_qwen_like_checkpoint(tmp_path)
    config = ProcessorConfig.from_checkpoint(tmp_path, "torchvision", {"max_pixels": 70_000})
    assert config is not None
    assert config.image.sizes is not None
    assert (config.image.sizes.token_side, config.image.sizes.max_pixels) == (32, 70_000)


@pytest.mark.parametrize("name", VISION)
def test_a_tower_value_that_differs_or_is_missing_is_refused_by_name(tmp_path: Path, name: str) -> None:
    build_qwen_like_checkpoint(tmp_path, {**VISION, name: 5})
    with pytest.raises(
        CheckpointConfigError, match=rf"vision_config\.{name}: is 5, but the image processor has (16|2)"
    ):
        ProcessorConfig.from_checkpoint(tmp_path, "torchvision", {})
    build_qwen_like_checkpoint(tmp_path, {other: value for other, value in VISION.items() if other != name})
    with pytest.raises(CheckpointConfigError, match=rf"vision_config\.{name}: is missing"):
        ProcessorConfig.from_checkpoint(tmp_path, "torchvision", {})


def test_a_tower_for_many_sizes_with_a_processor_for_one_is_refused(tmp_path: Path) -> None:
    size = {"height": 896, "width": 896}
    build_qwen_like_checkpoint(tmp_path, image_processor_type="Gemma3ImageProcessor", size=size)
    with pytest.raises(CheckpointConfigError, match=r"spatial_merge_size: .* all are resized to 896 x 896"):
        ProcessorConfig.from_checkpoint(tmp_path, "torchvision", {})


def test_a_tower_for_one_size_with_a_processor_for_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {"image_size": 896}}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(CheckpointConfigError, match="image_size: is 896, but pictures are resized to 224 x 224"):
        ProcessorConfig.from_checkpoint(tmp_path, "torchvision", {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.raises(CheckpointConfigError, match=r"vision_config\.patch_size: is missing"):
        ProcessorConfig.from_checkpoint(tmp_path, "torchvision", {})


@pytest.mark.parametrize("options", [{"max_pixels": 70_000}, {"size": {"longest_edge": 70_000}}])
def test_an_option_for_another_kind_of_model_is_refused_by_its_given_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"these can be changed: do_pan_and_scan, ") as caught:
        ProcessorConfig.from_checkpoint(checkpoint_path(), "torchvision", options)
    assert caught.value.field == f"mm_processor_kwargs.{next(iter(options))}"
