"""A batch whose contents other batches replace in the same memory, which a recorded step (a CUDA graph) keeps reading.

It has room for a fixed number of tokens in slices of any lengths, some of them single tokens. Padding tokens are
computed like others, but have no slot and belong to no block, so they have no effect.
"""

import torch

from keepsight.made_once import made_once
from keepsight.models.attention import AttentionBatch, DeviceRows, DeviceSlices, RequestSlice, View, count_blocks
from keepsight.models.block_table import BlockTable
from keepsight.models.sequence_rows import SequenceRows

# The most single tokens among longer slices, and the most tokens that are read.
MOST_ROWS = 64
# Blocks in addition to those of one slice of all tokens: each slice may end with a partly filled block.
SPARE_BLOCKS = 16
# Assumed keys per block, from which the number of programs that share a block's keys is chosen: several if blocks are
# few.
NUM_KEYS = 2048
# With longer contexts so few programs would take longer than launching the kernels one by one.
MOST_POSITIONS = 2**15


class RecordedBatch(AttentionBatch):
    def __init__(
        self, num_tokens: int, block_size: int, device: torch.device, *, uses_mrope: bool, spare_slot: int
    ) -> None:
        """`spare_slot`: where recurrent layers may keep the state of what is computed now, and of padding."""
        # No request has pages yet: the trial run may write to page 0 repeatedly.
        table = BlockTable(block_size, [0] * -(-num_tokens // block_size), device)
        super().__init__([RequestSlice(0, num_tokens, table, state_slot=spare_slot)], device, [0])
        # All positions are 0: some models do not have as many positions as there are tokens.
        self.positions = torch.zeros_like(self.positions)
        self.rotary_positions = self.positions.repeat(3, 1) if uses_mrope else self.positions.clone()
        self._num_rows, self._spare_slot = min(num_tokens, MOST_ROWS), spare_slot
        self._singles = self.single_rows = DeviceRows([], self.device, num_rows=self._num_rows)
        self.read_part = AttentionBatch([RequestSlice(0, 1, table)] * self._num_rows, device)
        assert self.read_part.rows is not None
        self._ends = self.read_part.rows
        self.read_rows = self._ends.tokens
        # Replayed batches may have any positions, so no window may be dropped as too wide to matter.
        self.longest = self.read_part.longest = MOST_POSITIONS
        # By view and rows per block; created when a layer first asks for them.
        self._longer: dict[tuple[View, int], DeviceSlices] = {}
        # None until a recurrent layer first asks for them.
        self._sequences: SequenceRows | None = None

    @made_once
    def sequences(self) -> SequenceRows:
        most = self._num_rows + SPARE_BLOCKS
        self._sequences = SequenceRows(self.slices, self.device, self.num_tokens, most, self._spare_slot)
        return self._sequences

    def longer_slices(self, view: View, rows_per_block: int) -> DeviceSlices:
        key = view, rows_per_block
        if key not in self._longer:
            self._longer[key] = DeviceSlices(self, view, rows_per_block, SPARE_BLOCKS)
            self._longer[key].longest = NUM_KEYS
        return self._longer[key]

    def has_room_for(self, batch: AttentionBatch) -> bool:
        return (
            batch.num_tokens <= self.num_tokens
            and max(len(batch.singles[0]), batch.num_read) <= self._num_rows
            and (self._sequences is None or len(batch.slices) <= len(self._sequences.slots))
            and batch.longest <= MOST_POSITIONS
            and all(
                count_blocks(batch.slices, each.rows_per_block) <= len(each.blocks) for each in self._longer.values()
            )
        )

    def replace(self, batch: AttentionBatch) -> None:
        """Overwrite with a batch for which there is room, and of which only the ends of slices are read."""
        count = batch.num_tokens
        self.positions[:count] = batch.positions
        self.rotary_positions[..., :count] = batch.rotary_positions
        self.slots[:count] = batch.slots
        self.slots[count:] = -1
        for each in self._longer.values():
            each.replace(batch)
        if self._sequences is not None:
            self._sequences.replace(batch.slices)
        self._singles.replace(*batch.singles)
        self._ends.replace(batch.read_ends, batch.read_tokens)
