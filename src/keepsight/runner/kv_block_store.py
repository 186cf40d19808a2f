"""The pages of keys and values: memory only.  Who owns which page is decided elsewhere."""

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
        dtype = place.of_keys
        num_bytes = math.prod(slots) * dtype.itemsize
        try:
            if place.device.type == "cpu":
                # There once it is written to; private, as pages that could be shared cost the kernel twice the work.
                memory = [mmap.mmap(-1, num_bytes, flags=_PRIVATE) for _ in range(num_tensors)]
                made = [torch.frombuffer(each, dtype=dtype).view(1, *slots) for each in memory]
            else:
                made = [torch.empty((num_tensors, *slots), device=place.device, dtype=dtype)]
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise PagesTooLargeError(num_blocks, num_tensors * num_bytes, str(error)) from error
        # In as many pieces as a page is copied by.
        self._pages = [each.view(len(each), num_blocks, -1) for each in made]
        tensors = list(itertools.chain.from_iterable(made))
        self.layers: Sequence[LayerCache] = list(map(LayerCache, tensors[::2], tensors[1::2]))
        # With prefix caching every prompt is written to where none was before, until all blocks are in use.
        self._ahead = MemoryAhead(memory, num_blocks)

    def copy(self, copies: Iterable[PageCopy]) -> None:
        for source, target in copies:
            for pages in self._pages:
                pages[:, target] = pages[:, source]

    def read(self, block_ids: Sequence[int]) -> Tensor:
        """A copy: [layers' keys and values, blocks, numbers of a block]."""
        chosen = _choose(block_ids)
        return torch.cat([pages[:, chosen] for pages in self._pages])

    def fill(self, block_ids: Sequence[int], content: Tensor, places: Sequence[int]) -> None:
        """With those at these places of what was read, of any blocks."""
        chosen = _choose(block_ids)
        parts = torch.split(content[:, _choose(places)], [len(pages) for pages in self._pages])
        for pages, part in zip(self._pages, parts, strict=True):
            pages[:, chosen] = part.to(pages.device)

    def note_used(self, block_ids: Iterable[int]) -> None:
        self._ahead.note_used(max(block_ids, default=-1) + 1)

    def prepare(self) -> bool:
        """A moment's work for blocks that will be used next; False where nothing is left to do."""
        return self._ahead.extend()


def _choose(rows: Sequence[int]) -> slice | list[int]:
    """What lies in a row is copied as one, or not at all: a tenth of the time."""
    first, last = rows[0], rows[-1]
    in_a_row = list(rows) == list(range(first, last + 1))
    return slice(first, last + 1) if in_a_row else list(rows)
