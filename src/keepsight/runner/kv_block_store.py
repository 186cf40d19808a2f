"""Holds the memory of the pages of keys and values, and of the states of recurrent layers.

Which sequence owns which page or state is decided elsewhere.
"""

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from keepsight.engine_config import SPARE_STATE_SLOTS
from keepsight.errors import PagesTooLargeError
from keepsight.models.attention import LayerCache
from keepsight.models.layers import Placement
from keepsight.models.model import ModelShape, StateShape
from keepsight.runner.memory_ahead import MemoryAhead
from keepsight.scheduling.step_plan import PageCopy, StateCopy

_Shape = tuple[tuple[int, ...], torch.dtype]

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class KvBlockStore:
    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, place: Placement, num_state_slots: int = 0
    ) -> None:
        self.block_size = block_size
        num_bytes = num_blocks * block_size * shape.numbers_per_position * place.kv_dtype.itemsize
        num_bytes += (num_state_slots + SPARE_STATE_SLOTS) * shape.bytes_per_state
        memory = list[mmap.mmap]()
        joined = place.device.type != "cpu"
        # For each layer, of its keys and of its values: [slots, kv_heads, head_dim].
        shapes = [((num_blocks * block_size, *heads), place.kv_dtype) for heads in shape.kv_heads for _ in range(2)]
        try:
            made, tensors = _allocate(shapes, place.device, memory, joined=joined)
            self.states = StateStore(shape.states, num_state_slots, place.device, joined=joined)
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise PagesTooLargeError(num_blocks, num_bytes, str(error)) from error
        # A page is copied in as many pieces as there are allocations: [tensors, blocks, numbers of a block].
        self._pages = [each.view(len(each), num_blocks, -1) for each in made]
        self.layers: Sequence[LayerCache] = list(map(LayerCache, tensors[::2], tensors[1::2]))
        # With prefix caching every prompt is written to untouched memory, until all blocks have been used.
        self._ahead = MemoryAhead(memory, num_blocks)

    def copy(self, copies: Iterable[PageCopy]) -> None:
        for source, target in copies:
            for pages in self._pages:
                pages[:, target] = pages[:, source]

    def read(self, block_ids: Sequence[int]) -> Tensor:
        """Return a copy of blocks: [blocks, keys and values of a block in all layers]."""
        chosen = _choose(block_ids)
        return torch.cat([pages[:, chosen].transpose(0, 1).flatten(1) for pages in self._pages], dim=1)

    def fill(self, block_ids: Sequence[int], content: Tensor, places: Sequence[int]) -> None:
        """Fill blocks with those at `places` of `content`, which was read from any blocks."""
        chosen = _choose(block_ids)
        numbers = [len(pages) * pages.shape[2] for pages in self._pages]
        parts = torch.split(content[_choose(places)].to(self._pages[0].device), numbers, dim=1)
        for pages, part in zip(self._pages, parts, strict=True):
            pages[:, chosen] = part.view(len(part), len(pages), -1).transpose(0, 1)

    def note_used(self, block_ids: Iterable[int]) -> None:
        self._ahead.note_used(max(block_ids, default=-1) + 1)

    def prepare(self) -> bool:
        """Do a moment's work for blocks that will be used next. Return False if nothing is left to do."""
        return self._ahead.extend()


class StateStore:
    def __init__(self, shapes: Sequence[StateShape], num_slots: int, device: torch.device, *, joined: bool) -> None:
        self.spare_slot, num_slots = num_slots, num_slots + SPARE_STATE_SLOTS
        of_slots = [((num_slots, *each.shape), each.dtype) for each in shapes]
        # [states, slots, ...] for each allocation, and [slots, ...] for each state.
        self._made, self.of_layers = _allocate(of_slots, device, [], joined=joined)

    def copy(self, copies: Iterable[StateCopy]) -> None:
        for source, target in copies:
            for states in self._made:
                states[:, target] = states[:, source]

    def clear(self, slots: Sequence[int]) -> None:
        """Make these states empty."""
        for states in self._made if slots else ():
            states[:, slots] = 0


def _allocate(
    shapes: Sequence[_Shape], device: torch.device, memory: list[mmap.mmap], *, joined: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Allocate a tensor of zeros of each shape. Return the allocations [tensors, *shape], and the tensors in order.

    `joined`: one allocation for all tensors of a shape, as on a GPU copying each costs a launch; else in host memory,
    added to `memory`, that is allocated as it is written.
    """
    made, tensors = list[Tensor](), dict[_Shape, Iterator[Tensor]]()
    for (shape, dtype), number in Counter(shapes).items():
        if joined:
            own = [torch.zeros((number, *shape), dtype=dtype, device=device)]
        else:
            own = [_map(shape, dtype, memory) for _ in range(number)]
        made += own
        tensors[shape, dtype] = chain.from_iterable(own)
    return made, [next(tensors[each]) for each in shapes]


def _map(shape: tuple[int, ...], dtype: torch.dtype, memory: list[mmap.mmap]) -> Tensor:
    """Return a tensor [1, *shape] in new memory of its own, added to `memory`."""
    # Allocated by the kernel at first write; private, as shared mappings cost the kernel twice the work.
    memory.append(mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=_PRIVATE))
    return torch.frombuffer(memory[-1], dtype=dtype).view(1, *shape)


def _choose(rows: Sequence[int]) -> slice | list[int]:
    """Return a slice if the rows are contiguous: indexing with it takes a tenth of the time, or makes a view."""
    first, last = rows[0], rows[-1]
    in_a_row = list(rows) == list(range(first, last + 1))
    return slice(first, last + 1) if in_a_row else list(rows)
