"""The pages of keys and values: memory only.  Who owns which page is decided elsewhere."""

import math
import mmap
from collections.abc import Iterable, Sequence

import torch

from keepsight.models.attention import LayerCache
from keepsight.models.layers import Placement
from keepsight.models.model import ModelShape
from keepsight.runner.memory_ahead import MemoryAhead

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class KvBlockStore:
    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int, place: Placement) -> None:
        slots = (num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        memory: list[mmap.mmap] = []
        dtype = place.of_keys
        if place.device.type == "cpu":
            num_bytes = math.prod(slots) * dtype.itemsize
            # There once it is written to; private, as pages that could be shared cost the kernel twice the work.
            memory = [mmap.mmap(-1, num_bytes, flags=_PRIVATE) for _ in range(2 * shape.num_layers)]
            tensors = [torch.frombuffer(each, dtype=dtype).view(slots) for each in memory]
        else:
            tensors = [torch.empty(slots, device=place.device, dtype=dtype) for _ in range(2 * shape.num_layers)]
        self.layers: Sequence[LayerCache] = list(map(LayerCache, tensors[::2], tensors[1::2]))
        # With prefix caching every prompt is written to where none was before, until all blocks are in use.
        self._ahead = MemoryAhead(memory, num_blocks)

    def note_used(self, block_ids: Iterable[int]) -> None:
        self._ahead.note_used(max(block_ids, default=-1) + 1)

    def prepare(self) -> bool:
        """A moment's work for blocks that will be used next; False where nothing is left to do."""
        return self._ahead.extend()
