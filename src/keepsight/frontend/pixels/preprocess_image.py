"""Turns a picture's pixels into those that the encoder takes: cut out, resized, still uint8.

The only file of the frontend that uses torch, and only on the CPU. Bit for bit equal to the reference after its resize;
rescaling and normalizing are done by a table (`runner/normalize_pixels.py`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from keepsight.image_processor_config import ImageProcessorConfig
from keepsight.media import CropBox
from keepsight.requests import Pixels

# By PIL's resampling code. torchvision's nearest mode never antialiases, its other two do.
TORCH_MODES: dict[int, dict[str, Any]] = {
    0: {"mode": "nearest-exact"},
    2: {"mode": "bilinear", "antialias": True},
    3: {"mode": "bicubic", "antialias": True},
}


def preprocess_image(rgb: Pixels, parts: Sequence[CropBox | None], config: ImageProcessorConfig) -> tuple[Pixels, ...]:
    """Return each crop (None: the whole picture) as uint8 [height, width, 3] of the configured size."""
    return tuple(resize_pixels(rgb if part is None else _cut_out(rgb, part), config) for part in parts)


def resize_pixels(rgb: Pixels, config: ImageProcessorConfig) -> Pixels:
    """Return uint8 [height, width, 3], contiguous; the caller's own array only if it is already so."""
    if rgb.shape == (config.height, config.width, 3):
        return _pack(rgb)
    if config.backend == "pil":
        return _resize_by_pillow(rgb, config)
    return _resize_by_torch(rgb, config)


def _cut_out(rgb: Pixels, crop: CropBox) -> Pixels:
    area = rgb[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    # A contiguous view may be returned without a resize, and would keep the whole picture in memory.
    return area.copy() if area.flags.c_contiguous else area


def _resize_by_pillow(rgb: Pixels, config: ImageProcessorConfig) -> Pixels:
    image = _as_pillow_image(rgb)
    # The same memory as RGB: otherwise Pillow would resize the fourth byte as well.
    bands = image if image.mode == "RGB" else Image.fromarrow(image, "RGB", image.size)
    resized = bands.resize((config.width, config.height), resample=config.resample)
    return np.frombuffer(resized.tobytes("raw", "RGB"), dtype=np.uint8).reshape(config.height, config.width, 3)


def _as_pillow_image(rgb: Pixels) -> Image.Image:
    padded = _padded_view(rgb)
    if padded is None:
        return Image.fromarray(np.ascontiguousarray(rgb))
    # Pillow's RGB has a pixel stride of 4 bytes too, so the image borrows these: a copy takes 1/3 of the resize's time.
    height, width, _ = padded.shape
    return Image.frombuffer("RGBX", (width, height), np.ascontiguousarray(padded), "raw", "RGBX", 0, 1)


def _resize_by_torch(rgb: Pixels, config: ImageProcessorConfig) -> Pixels:
    padded = _padded_view(rgb)
    pixels = np.ascontiguousarray(rgb if padded is None else padded)  # [height, width, 3 or 4]
    # A channels-last view has a fast kernel; the reference calls .contiguous() and loses it.
    tensor = torch.from_numpy(_as_writable(pixels)).permute(2, 0, 1).unsqueeze(0)  # [1, 3 or 4, height, width]
    resized = torch.nn.functional.interpolate(tensor, (config.height, config.width), **TORCH_MODES[config.resample])
    return _pack(resized[0].permute(1, 2, 0).numpy()[..., :3])


def _padded_view(rgb: Pixels) -> Pixels | None:
    """Return [height, width, 4], whatever the fourth bytes hold; None if the pixel stride is not 4 bytes."""
    if rgb.strides[1:] != (4, 1) or not isinstance(rgb.base, np.ndarray):
        return None
    height, width, _ = rgb.shape
    _, end_of_pixels = np.lib.array_utils.byte_bounds(rgb)
    _, end_of_memory = np.lib.array_utils.byte_bounds(rgb.base)
    if end_of_pixels >= end_of_memory:
        return None  # the last pixel has no fourth byte
    return np.lib.stride_tricks.as_strided(rgb, (height, width, 4), rgb.strides, writeable=False)


def _pack(rgb: Pixels) -> Pixels:
    if rgb.flags.c_contiguous:
        return rgb
    packed = np.empty(rgb.shape, dtype=np.uint8)
    # Channel by channel: four times as fast as numpy's copy of many rows of 3.
    for channel in range(3):
        packed[..., channel] = rgb[..., channel]
    return packed


class _Writable:
    """Presents an array as writable, to silence torch's warning about arrays that are not. Ours are only read."""

    def __init__(self, array: Pixels) -> None:
        self._array = array
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _as_writable(array: Pixels) -> Pixels:
    return array if array.flags.writeable else np.asarray(_Writable(array))
