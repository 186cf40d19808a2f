"""Holds the memory of the pages of keys and values, and of the states of recurrent layers.

Which sequence owns which page or state is decided elsewhere.
"""

import math
import mmap
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from keepsight.engine_config import SPARE_STATE_SLOTS
from keepsight.errors import PagesTooLargeError
from keepsight.models.attention import LayerCache
from keepsight.models.layers import Placement
from keepsight.models.model import ModelShape, StateShape
from keepsight.runner.memory_ahead import MemoryAhead
from keepsight.scheduling.step_plan import PageCopy, StateCopy

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class KvBlockStore:
    def __init__(
        self, shape: ModelShape, num_blocks: int, block_size: int, place: Placement, num_state_slots: int = 0
    ) -> None:
        self.block_size = block_size
        num_bytes = num_blocks * block_size * shape.numbers_per_position * place.kv_dtype.itemsize
        num_bytes += (num_state_slots + SPARE_STATE_SLOTS) * shape.bytes_per_state
        memory = list[mmap.mmap]()
        # [tensors, slots, kv_heads, head_dim] for each shape of heads, on a CPU for each tensor.
        made: list[Tensor] = []
        try:
            for heads, num_layers in Counter(shape.kv_heads).items():
                num_tensors, slots = 2 * num_layers, (num_blocks * block_size, *heads)
                if place.device.type == "cpu":
                    made += [_map(slots, place.kv_dtype, memory) for _ in range(num_tensors)]
                else:
                    made.append(torch.empty((num_tensors, *slots), device=place.device, dtype=place.kv_dtype))
            self.states = StateStore(shape.states, num_state_slots, place.device, joined=place.device.type != "cpu")
        except (OSError, OverflowError, torch.OutOfMemoryError) as error:
            raise PagesTooLargeError(num_blocks, num_bytes, str(error)) from error
        # A page is copied in as many pieces as there are allocations: [tensors, blocks, numbers of a block].
        self._pages = [each.view(len(each), num_blocks, -1) for each in made]
        tensors = {
            heads: iter([tensor for each in made if tuple(each.shape[2:]) == heads for tensor in each])
            for heads in set(shape.kv_heads)
        }
        self.layers: Sequence[LayerCache] = [
            LayerCache(next(tensors[heads]), next(tensors[heads])) for heads in shape.kv_heads
        ]
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
        """`joined`: as few tensors as possible, as on a GPU copying each costs a launch; else in host memory that is
        allocated as states are written.
        """
        self.spare_slot, num_slots = num_slots, num_slots + SPARE_STATE_SLOTS
        # [states, slots, ...]: if joined, one for all states of a shape.
        self._made: Sequence[Tensor]
        # [slots, ...] for each state.
        self.of_layers: Sequence[Tensor]
        if not joined:
            self._made = [_map((num_slots, *each.shape), each.dtype, []) for each in shapes]
            self.of_layers = [states for [states] in self._made]
        else:
            made = {
                each: torch.zeros(number, num_slots, *each.shape, dtype=each.dtype, device=device)
                for each, number in Counter(shapes).items()
            }
            self._made, following = list(made.values()), {each: iter(states) for each, states in made.items()}
            self.of_layers = [next(following[each]) for each in shapes]

    def copy(self, copies: Iterable[StateCopy]) -> None:
        for source, target in copies:
            for states in self._made:
                states[:, target] = states[:, source]

    def clear(self, slots: Sequence[int]) -> None:
        """Make these states empty."""
        for states in self._made if slots else ():
            states[:, slots] = 0


def _map(slots: tuple[int, ...], dtype: torch.dtype, memory: list[mmap.mmap]) -> Tensor:
    """Return a tensor [1, *slots] in new memory of its own, added to `memory`."""
    # Allocated by the kernel at first write; private, as shared mappings cost the kernel twice the work.
    memory.append(mmap.mmap(-1, math.prod(slots) * dtype.itemsize, flags=_PRIVATE))
    return torch.frombuffer(memory[-1], dtype=dtype).view(1, *slots)


def _choose(rows: Sequence[int]) -> slice | list[int]:
    """Return a slice if the rows are contiguous: indexing with it takes a tenth of the time, or makes a view."""
    first, last = rows[0], rows[-1]
    in_a_row = list(rows) == list(range(first, last + 1))
    return slice(first, last + 1) if in_a_row else list(rows)
