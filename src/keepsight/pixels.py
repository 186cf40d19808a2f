"""Pixels as caches keep them: immutable, and counted by the memory that they really hold.

Embeddings computed by a caller, and the samples of a sound, travel like pixels, as the bytes of their float32 values: a
last axis of 4 instead of 3 tells both from pixels, and an item's modality tells them apart. The output of a borrowed
processor is several arrays, which are carried as such bytes, too.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from keepsight.requests import CarriedPixels, Pixels, Shape

logger = logging.getLogger(__name__)
_ROW_BYTES, _LENGTH_BYTES = 4096, 8


@dataclass(frozen=True, slots=True)
class HeldPixels:
    """One entry of a cache of pixels."""

    media_hash: str
    num_bytes: int
    is_pinned: bool


def carry_embeddings(embeddings: npt.NDArray[np.float32]) -> Pixels:
    """View embeddings, [tokens, hidden] and contiguous, as pixels; nothing is copied."""
    return embeddings.view(np.uint8).reshape(*embeddings.shape, 4)


def carried_embeddings(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Return the embeddings that `pixels` carry: [..., tokens, hidden]."""
    return pixels.view(np.float32)[..., 0]


def carry_samples(samples: npt.NDArray[np.float32]) -> Pixels:
    """View samples, [samples] and contiguous, as pixels; nothing is copied."""
    return carry_embeddings(samples[:, None])


def carried_samples(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Return the samples that `pixels` carry: [..., samples]."""
    return carried_embeddings(pixels)[..., 0]


def carry_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Pixels:
    """Pack named arrays of any dtypes and shapes into pixels.

    Rows are as wide as pixels may be, so that there are few of them; the payload's length is stored at the end.
    """
    content = safetensors.numpy.save(dict(arrays))
    padding = bytes(-(len(content) + _LENGTH_BYTES) % _ROW_BYTES)
    carried = content + padding + len(content).to_bytes(_LENGTH_BYTES, "little")
    return np.frombuffer(carried, np.uint8).reshape(-1, _ROW_BYTES // 4, 4)


def shape_of_arrays(num_bytes: int) -> Shape:
    """Return the shape of pixels that carry arrays in so many bytes."""
    return num_bytes // _ROW_BYTES, _ROW_BYTES // 4, 4


def carried_arrays(pixels: Pixels) -> dict[str, npt.NDArray[Any]]:
    carried = pixels.reshape(-1)
    length = int.from_bytes(carried[-_LENGTH_BYTES:].tobytes(), "little")
    return safetensors.numpy.load(carried[:length].tobytes())


def show_a_picture(pixels: CarriedPixels) -> bool:
    return shape_of(pixels)[2] == 3


def shape_of(pixels: CarriedPixels) -> Shape:
    height, width, depth = pixels.shape
    return height, width, depth


def as_kept(pixels: Pixels) -> Pixels:
    """Return the pixels read-only. A view of a larger array is copied, as it would hold memory that is not counted."""
    kept = pixels if held_bytes(pixels) == pixels.nbytes else pixels.copy()
    kept.flags.writeable = False
    return kept


def agree(media_hash: str, held: Pixels, made: Pixels) -> bool:
    """Return whether kept pixels are those that their picture gives; if not, log it: the caller drops what it held."""
    is_equal = np.array_equal(held, made)
    if not is_equal:
        logger.error("the processor cache held OTHER PIXELS under %s than its picture gives: dropped", media_hash)
    return is_equal


def held_bytes(pixels: Pixels) -> int:
    """Return the bytes that dropping `pixels` would free: a view holds the whole array that it views."""
    holder = pixels
    while isinstance(holder.base, np.ndarray):
        holder = holder.base
    return holder.nbytes
