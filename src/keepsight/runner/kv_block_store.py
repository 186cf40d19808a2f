"""The pages of keys and values: memory only.  Who owns which page is decided elsewhere."""

import math
import mmap
from collections.abc import Sequence

import torch

from keepsight.models.attention import LayerCache
from keepsight.models.layers import Placement
from keepsight.models.model import ModelShape


class KvBlockStore:
    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int, place: Placement) -> None:
        self.block_size = block_size
        slots = (num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        reserve = _reserve_lazily if place.device.type == "cpu" else _reserve
        self.layers: Sequence[LayerCache] = [
            LayerCache(reserve(slots, place), reserve(slots, place)) for _ in range(shape.num_layers)
        ]


def _reserve(slots: tuple[int, ...], place: Placement) -> torch.Tensor:
    return torch.empty(slots, device=place.device, dtype=place.dtype)


def _reserve_lazily(slots: tuple[int, ...], place: Placement) -> torch.Tensor:
    """Memory that is there once it is written to: in large pages, because small ones cost a fault for every few tokens.

    With prefix caching every prompt is written to where none was before, until all pages are in use.
    """
    memory = mmap.mmap(-1, math.prod(slots) * place.dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=place.dtype).view(slots)
