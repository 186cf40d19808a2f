"""The pages of keys and values: memory only.  Who owns which page is decided elsewhere."""

from collections.abc import Sequence

import torch

from keepsight.models.attention import LayerCache
from keepsight.models.layers import Placement
from keepsight.models.model import ModelShape


class KvBlockStore:
    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int, place: Placement) -> None:
        self.block_size = block_size
        slots = (num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        self.layers: Sequence[LayerCache] = [
            LayerCache(
                torch.empty(slots, device=place.device, dtype=place.dtype),
                torch.empty(slots, device=place.device, dtype=place.dtype),
            )
            for _ in range(shape.num_layers)
        ]
