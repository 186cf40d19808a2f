"""A batch that other batches take the place of, in the same memory: what a recorded step goes on reading.

It has room for so many tokens in slices of any lengths, and for some single tokens among them.  Tokens of nobody are
computed as others are; they have no slot and lie in no block, so that nothing comes of them.
"""

import torch

from keepsight.models.attention import AttentionBatch, DeviceRows, DeviceSlices, RequestSlice, count_blocks
from keepsight.models.block_table import BlockTable

# Of single tokens among longer slices, and of tokens that are read.
MOST_ROWS = 64
# Besides those that one slice of all tokens has: each slice may end with a block of few rows.
SPARE_BLOCKS = 16
# Keys that a block sees, by which the number of programs that share them is chosen: with few blocks several of them.
NUM_KEYS = 2048
# Behind more than that, so few programs would take longer than launching each kernel.
MOST_POSITIONS = 2**15


class RecordedBatch(AttentionBatch):
    def __init__(self, num_tokens: int, block_size: int, device: torch.device, *, turns_by_rows: bool) -> None:
        # Nobody has a page yet: what is tried may write to the first, over and over.
        table = BlockTable(block_size, [0] * -(-num_tokens // block_size), device)
        super().__init__([RequestSlice(0, num_tokens, table)], device, [0])
        self.may_have_nobody = True
        # Each the first: of others some models have not so many.
        self.positions = torch.zeros_like(self.positions)
        self.rotary_positions = self.positions.repeat(3, 1) if turns_by_rows else self.positions.clone()
        self._num_rows = min(num_tokens, MOST_ROWS)
        self._singles = self.single_rows = DeviceRows([], self.device, num_rows=self._num_rows)
        self.read_part = AttentionBatch([RequestSlice(0, 1, table)] * self._num_rows, device)
        assert self.read_part.rows is not None
        self._ends = self.read_part.rows
        self.read_rows = self._ends.tokens
        # Others stand anywhere: no window is too wide to matter.
        self.longest = self.read_part.longest = MOST_POSITIONS
        # Of each window, from when a layer first asked for them.
        self._longer: dict[int | None, DeviceSlices] = {}

    def longer_slices(self, window: int | None, rows_per_block: int) -> DeviceSlices:
        if window not in self._longer:
            self._longer[window] = DeviceSlices(self, window, rows_per_block, SPARE_BLOCKS)
            self._longer[window].longest = NUM_KEYS
        return self._longer[window]

    def has_room_for(self, batch: AttentionBatch) -> bool:
        return (
            batch.num_tokens <= self.num_tokens
            and max(len(batch.singles[0]), batch.num_read) <= self._num_rows
            and batch.longest <= MOST_POSITIONS
            and all(
                count_blocks(batch.slices, each.rows_per_block) <= len(each.blocks) for each in self._longer.values()
            )
        )

    def replace(self, batch: AttentionBatch) -> None:
        """By one that there is room for, of whose slices the ends alone are read."""
        count = batch.num_tokens
        self.positions[:count] = batch.positions
        self.rotary_positions[..., :count] = batch.rotary_positions
        self.slots[:count] = batch.slots
        self.slots[count:] = -1
        for each in self._longer.values():
            each.replace(batch)
        self._singles.replace(*batch.singles)
        self._ends.replace(batch.read_ends, batch.read_tokens)
