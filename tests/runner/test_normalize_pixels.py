"""Every value of every channel; tests/frontend/pixels/test_preprocess_image.py compares whole pictures."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from keepsight.image_processor_config import Backend, ImageProcessorConfig
from keepsight.runner.normalize_pixels import PixelNormalizer, normalization_table

OPTIONS: list[dict[str, Any]] = [
    {},
    {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)},
    {"image_mean": (0.5, 0.5, 0.4), "rescale_factor": 1 / 256},
    {"image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)},
]
BACKENDS: tuple[Backend, ...] = ("pil", "torchvision")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def every_value(config: ImageProcessorConfig) -> torch.Tensor:
    """Return uint8 [2, height, width, 3] in which every channel takes every value."""
    generator = torch.Generator().manual_seed(7)
    shuffled = torch.stack([torch.randperm(256, generator=generator) for _ in range(6)])
    return shuffled.to(torch.uint8).reshape(2, 3, config.height, config.width).permute(0, 2, 3, 1).contiguous()


def config_for(backend: Backend, options: dict[str, Any]) -> ImageProcessorConfig:
    return ImageProcessorConfig(height=8, width=32, backend=backend, **options)


def pil_reference(pixels: torch.Tensor, config: ImageProcessorConfig) -> torch.Tensor:
    from transformers.image_transforms import normalize, rescale

    def of_one(picture: Any) -> Any:
        rescaled = rescale(picture, config.rescale_factor, input_data_format="channels_last")
        return normalize(rescaled, config.image_mean, config.image_std, input_data_format="channels_last")

    return torch.from_numpy(np.stack([of_one(picture) for picture in pixels.numpy()]))


def torchvision_reference(pixels: torch.Tensor, config: ImageProcessorConfig) -> torch.Tensor:
    """`rescale_and_normalize` in its own order of operations; torchvision itself may not be installed here."""
    mean = torch.tensor(config.image_mean) * (1.0 / config.rescale_factor)
    std = torch.tensor(config.image_std) * (1.0 / config.rescale_factor)
    channels_first = pixels.permute(0, 3, 1, 2).to(torch.float32)
    return channels_first.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1)).permute(0, 2, 3, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_value_equals_the_reference_rounded_to_the_dtype(
    options: dict[str, Any], dtype: torch.dtype, device: str
) -> None:
    references = {"pil": pil_reference, "torchvision": torchvision_reference}
    for backend in BACKENDS:
        config = config_for(backend, options)
        pixels = every_value(config)
        normalized = PixelNormalizer(config, device, dtype)(pixels.to(device)).cpu()
        assert normalized.dtype == dtype
        assert torch.equal(normalized, references[backend](pixels, config).to(dtype)), backend


def test_the_two_backends_differ_so_each_needs_its_own_table() -> None:
    of_pil, of_torchvision = (normalization_table(config_for(backend, OPTIONS[1])) for backend in BACKENDS)
    assert not torch.equal(of_pil, of_torchvision)
    assert torch.allclose(of_pil, of_torchvision, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_s_default_precision_changes_no_value(backend: Backend, set_default_dtype: Callable[[str], None]) -> None:
    expected = normalization_table(config_for(backend, OPTIONS[1]))
    set_default_dtype("bfloat16")
    assert torch.equal(normalization_table(config_for(backend, OPTIONS[1])), expected)


def test_pixels_that_are_not_contiguous_are_normalized_all_the_same() -> None:
    config = config_for("torchvision", OPTIONS[1])
    pixels = every_value(config)
    normalize = PixelNormalizer(config, "cpu", torch.float32)
    strided = pixels.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert torch.equal(normalize(strided), normalize(pixels))


def test_the_result_is_contiguous_and_the_pixels_are_left_alone() -> None:
    config = config_for("pil", OPTIONS[1])
    pixels = every_value(config)
    before = pixels.clone()
    assert PixelNormalizer(config, "cpu", torch.bfloat16)(pixels).is_contiguous()
    assert torch.equal(pixels, before)


def test_pictures_of_any_width_are_normalized_by_one_table() -> None:
    config = config_for("torchvision", OPTIONS[1])
    normalize = PixelNormalizer(config, "cpu", torch.float32)
    for height, width in ((8, 32), (1, 1), (3, 100), (7, 2)):
        pixels = torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8)
        assert torch.equal(normalize(pixels), torchvision_reference(pixels, config))
