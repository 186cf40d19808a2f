"""Pixels as caches keep them: unchangeable, and counted by the memory that they really hold."""

from dataclasses import dataclass

import numpy as np

from keepsight.requests import Pixels, Shape


@dataclass(frozen=True, slots=True)
class HeldPixels:
    """One entry of a cache of pixels."""

    media_hash: str
    num_bytes: int
    is_pinned: bool


def shape_of(pixels: Pixels) -> Shape:
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
