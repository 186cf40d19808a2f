"""Pixels as caches keep them: unchangeable, and counted by the memory that they really hold.

Embeddings that a caller computed take the same way as pixels, as the bytes of their float32, and so do the samples of a
sound: a fourth byte in the last axis tells both from pixels, and an item's modality one from the other.  What another
processor than ours makes of a picture is several arrays, carried as such bytes, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from keepsight.requests import CarriedPixels, Pixels, Shape

_ROW_BYTES, _LENGTH_BYTES = 4096, 8


@dataclass(frozen=True, slots=True)
class HeldPixels:
    """One entry of a cache of pixels."""

    media_hash: str
    num_bytes: int
    is_pinned: bool


def carry_embeddings(embeddings: npt.NDArray[np.float32]) -> Pixels:
    """[tokens, hidden], contiguous; nothing is copied."""
    return embeddings.view(np.uint8).reshape(*embeddings.shape, 4)


def carried_embeddings(pixels: Pixels) -> npt.NDArray[np.float32]:
    """[..., tokens, hidden]"""
    return pixels.view(np.float32)[..., 0]


def carry_samples(samples: npt.NDArray[np.float32]) -> Pixels:
    """[samples], contiguous; nothing is copied."""
    return carry_embeddings(samples[:, None])


def carried_samples(pixels: Pixels) -> npt.NDArray[np.float32]:
    """[..., samples]"""
    return carried_embeddings(pixels)[..., 0]


def carry_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Pixels:
    """Of any types and shapes, by their names.  In rows as wide as pixels may have, so many are few; how many bytes of
    them count stands at the end.
    """
    told = safetensors.numpy.save(dict(arrays))
    padding = bytes(-(len(told) + _LENGTH_BYTES) % _ROW_BYTES)
    carried = told + padding + len(told).to_bytes(_LENGTH_BYTES, "little")
    return np.frombuffer(carried, np.uint8).reshape(-1, _ROW_BYTES // 4, 4)


def shape_of_arrays(num_bytes: int) -> Shape:
    """Of so many bytes that carry some."""
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
    """Never to change; and holding no more memory than its own, as a view of more would do, uncounted."""
    kept = pixels if held_bytes(pixels) == pixels.nbytes else pixels.copy()
    kept.flags.writeable = False
    return kept


def held_bytes(pixels: Pixels) -> int:
    """What would be freed if it went: a view holds all of what it looks at."""
    holder = pixels
    while isinstance(holder.base, np.ndarray):
        holder = holder.base
    return holder.nbytes
