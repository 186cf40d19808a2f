"""The pages of one sequence in order, and the slot in the KV store of each of its positions.

Knows nothing of keys and values, nor of who else uses a page. Every operation takes time in proportion to what changed
or to the size of its result, never to the length of the sequence.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_CAPACITY = 256


class BlockTable:
    def __init__(self, block_size: int, block_ids: Sequence[int] = (), device: torch.device | str = "cpu") -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []
        # Ascending indices of the blocks whose page is not the successor of the previous block's page.
        self._breaks: list[int] = []
        self._slots = torch.empty(_FIRST_CAPACITY, dtype=torch.int64, device=device)  # of each position
        self.replace_from(0, block_ids)

    def replace_from(self, first_block: int, block_ids: Sequence[int]) -> None:
        """table[first_block:] = block_ids"""
        assert first_block <= len(self.block_ids), (first_block, len(self.block_ids))
        if first_block == len(self.block_ids) and not block_ids:
            return
        del self.block_ids[first_block:]
        del self._breaks[bisect_left(self._breaks, first_block) :]
        self.block_ids.extend(block_ids)
        pages = self.block_ids
        self._breaks.extend(
            block for block in range(max(1, first_block), len(pages)) if pages[block] != pages[block - 1] + 1
        )
        self._write_slots(first_block, block_ids)

    def _write_slots(self, first_block: int, block_ids: Sequence[int]) -> None:
        size, end = self.block_size, len(self.block_ids) * self.block_size
        if end > len(self._slots):
            grown = self._slots.new_empty(max(end, 2 * len(self._slots)))
            grown[: len(self._slots)] = self._slots
            self._slots = grown
        pages = torch.tensor(block_ids, dtype=torch.int64)[:, None] * size + torch.arange(size)
        self._slots[first_block * size : end] = pages.flatten()

    def slot(self, position: int) -> int:
        return self.block_ids[position // self.block_size] * self.block_size + position % self.block_size

    @property
    def address(self) -> int:
        """The address of the slots of its positions, which are contiguous; valid until pages are added."""
        return self._slots.data_ptr()

    def slots(self, begin: int, end: int) -> Tensor:
        """Return the slots of positions [begin, end)."""
        assert end <= len(self.block_ids) * self.block_size, (end, self.block_ids)
        return self._slots[begin:end]

    def run(self, begin: int, end: int) -> slice | None:
        """Return the slots of positions [begin, end) as a slice if they are contiguous; otherwise None."""
        first, last = begin // self.block_size, (end - 1) // self.block_size
        if bisect_right(self._breaks, first) < bisect_right(self._breaks, last):
            return None
        start = self.slot(begin)
        return slice(start, start + end - begin)
