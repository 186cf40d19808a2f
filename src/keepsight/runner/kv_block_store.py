"""Holds the memory of the pages of keys and values.  Which sequence owns which page is decided elsewhere."""

import itertools
import math
import mmap
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from keepsight.errors import PagesTooLargeError
from keepsight.models.attention import LayerCache
from keepsight.models.layers import Placement
from keepsight.models.model import ModelShape
from keepsight.runner.memory_ahead import MemoryAhead
from keepsight.scheduling.step_plan import PageCopy

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class KvBlockStore:
    def __init__(self, shape: ModelShape, num_blocks: int, block_size: int, place: Placement) -> None:
        num_tensors, slots = 2 * shape.num_layers, (num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        memory: list[mmap.mmap] = []
        dtype = place.kv_dtype
        num_bytes = math.prod(slots) * dtype.itemsize
        try:
            if place.device.type == "cpu":
                # Allocated by the kernel at first write; private, as shared mappings cost the kernel twice the work.
                memory = [mmap.mmap(-1, num_bytes, flags=_PRIVATE) for _ in range(num_tensors)]
                made = [torch.frombuffer(each, dtype=dtype).view(1, *slots) for each in memory]
            else:
                made = [torch.empty((num_tensors, *slots), device=place.device, dtype=dtype)]
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise PagesTooLargeError(num_blocks, num_tensors * num_bytes, str(error)) from error
        # Views [pieces, blocks, ...] of each allocation; a page is copied in as many pieces.
        self._pages = [each.view(len(each), num_blocks, -1) for each in made]
        tensors = list(itertools.chain.from_iterable(made))
        self.layers: Sequence[LayerCache] = list(map(LayerCache, tensors[::2], tensors[1::2]))
        # With prefix caching every prompt is written to untouched memory, until all blocks have been used.
        self._ahead = MemoryAhead(memory, num_blocks)

    def copy(self, copies: Iterable[PageCopy]) -> None:
        for source, target in copies:
            for pages in self._pages:
                pages[:, target] = pages[:, source]

    def read(self, block_ids: Sequence[int]) -> Tensor:
        """Return a copy of blocks: [layers' keys and values, blocks, elements of a block]."""
        chosen = _choose(block_ids)
        return torch.cat([pages[:, chosen] for pages in self._pages])

    def fill(self, block_ids: Sequence[int], content: Tensor, places: Sequence[int]) -> None:
        """Fill blocks with those at `places` of `content`, which was read from any blocks."""
        chosen = _choose(block_ids)
        parts = torch.split(content[:, _choose(places)], [len(pages) for pages in self._pages])
        for pages, part in zip(self._pages, parts, strict=True):
            pages[:, chosen] = part.to(pages.device)

    def note_used(self, block_ids: Iterable[int]) -> None:
        self._ahead.note_used(max(block_ids, default=-1) + 1)

    def prepare(self) -> bool:
        """Do a moment's work for blocks that will be used next.  Return False if nothing is left to do."""
        return self._ahead.extend()


def _choose(rows: Sequence[int]) -> slice | list[int]:
    """Return a slice if the rows are contiguous: indexing with it takes a tenth of the time, or makes a view."""
    first, last = rows[0], rows[-1]
    in_a_row = list(rows) == list(range(first, last + 1))
    return slice(first, last + 1) if in_a_row else list(rows)
