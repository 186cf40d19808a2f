"""Rescales and normalizes pixels by table lookup, as a channel of a pixel has only 256 possible values.

The table is computed on the CPU with the reference's own formula, so its entries, and thus every pixel on every device,
equal the reference's bit for bit.
"""

import numpy as np
import torch

from keepsight.image_processor_config import ImageProcessorConfig


class PixelNormalizer:
    """Turns uint8 [n, height, width, 3] into `dtype` of the same shape on `device`: channels last, for the encoder."""

    def __init__(self, config: ImageProcessorConfig, device: torch.device | str, dtype: torch.dtype) -> None:
        table = normalization_table(config).to(dtype)  # [3, 256]
        # Most checkpoints treat all channels alike, so one table serves for all.
        self._is_grey = bool((table == table[0]).all())
        self._table = (table[0] if self._is_grey else table.flatten()).to(device)
        # Where the tables of red, green and blue begin; int32 because torch takes a uint8 index as a mask.
        self._starts = torch.tensor([0, 256, 512], dtype=torch.int32).to(device)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        assert pixels.dtype == torch.uint8, pixels.dtype
        assert pixels.shape[-1] == 3, pixels.shape
        indices = pixels.to(self._table.device).to(torch.int32, memory_format=torch.contiguous_format)
        if not self._is_grey:
            # Add to whole rows: adding to rows of three would take ten times as long.
            starts = self._starts.repeat(pixels.shape[-2])  # [width * 3]
            indices.view(-1, len(starts)).add_(starts)
        # index_select with int32 takes a quarter of the time of table[indices], here and with int64.
        return self._table.index_select(0, indices.view(-1)).view(pixels.shape)


def normalization_table(config: ImageProcessorConfig) -> torch.Tensor:
    """Return float32 [3, 256]: what the reference's backend makes of each value in each channel."""
    return _torchvision_table(config) if config.backend == "torchvision" else _pil_table(config)


def _torchvision_table(config: ImageProcessorConfig) -> torch.Tensor:
    """Compute TorchvisionBackend.rescale_and_normalize: the factor is folded into mean and deviation, in float32."""
    mean = torch.tensor(config.image_mean, dtype=torch.float32) * (1.0 / config.rescale_factor)
    std = torch.tensor(config.image_std, dtype=torch.float32) * (1.0 / config.rescale_factor)
    values = torch.arange(256, dtype=torch.float32).expand(3, 256)
    return values.sub(mean.view(3, 1)).div(std.view(3, 1))


def _pil_table(config: ImageProcessorConfig) -> torch.Tensor:
    """Compute PilBackend's rescale in float64, rounded to float32, then its normalize."""
    rescaled = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
    mean = np.array(config.image_mean, dtype=np.float32)
    std = np.array(config.image_std, dtype=np.float32)
    return torch.from_numpy(((rescaled[:, None] - mean) / std).T.copy())
