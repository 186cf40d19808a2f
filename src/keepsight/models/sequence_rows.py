"""Which rows of a step's batch are the tokens of which sequence, and where its recurrent layers keep their states."""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Piece(Protocol):
    """The tokens of one sequence in a step."""

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def state_slot(self) -> int | None: ...

    @property
    def kept_states(self) -> Sequence[tuple[int, int]]: ...


class SequenceRows:
    """`replace` overwrites them in place. Rows behind those of all sequences are padding, and belong to none."""

    def __init__(
        self,
        slices: Sequence[Piece],
        device: torch.device,
        num_rows: int | None = None,
        num_sequences: int | None = None,
        padding_slot: int = 0,
    ) -> None:
        """`num_rows`, `num_sequences`: of the largest batch to be replaced with; by default, as many as there are."""
        self._padding_slot = padding_slot
        most = len(slices) if num_sequences is None else num_sequences
        rows = sum(piece.length for piece in slices) if num_rows is None else num_rows
        # Even, as Triton compiles a kernel again if the alignment of a pointer argument changes.
        self._sizes = [size + size % 2 for size in (most + 1, most, rows, rows)]
        self._on_device = self._flat_inputs(slices).to(device)
        firsts, slots, of_rows, kept_slots = torch.split(self._on_device, self._sizes)
        # [sequences + 1]: the first row of each sequence, and the one behind the last
        self.first_rows = firsts[: most + 1]
        # [sequences]: where its state is kept; `padding_slot` if there is no such sequence
        self.slots = slots[:most]
        # [rows]: each row's sequence; negative for padding
        self.of_rows = of_rows[:rows]
        # [rows]: where the state after the row is kept as well; negative if nowhere
        self.kept_slots = kept_slots[:rows]

    def replace(self, slices: Sequence[Piece]) -> None:
        """Overwrite with as many sequences and rows, or fewer."""
        self._on_device.copy_(self._flat_inputs(slices))

    def _flat_inputs(self, slices: Sequence[Piece]) -> Tensor:
        most, num_slots, num_rows, _ = self._sizes
        ends = list(itertools.accumulate(piece.length for piece in slices))
        firsts = [0, *ends, *[ends[-1]] * (most - 1 - len(slices))]
        slots = [*map(_state_slot_of, slices), *[self._padding_slot] * (num_slots - len(slices))]
        of_rows = [number for number, piece in enumerate(slices) for _ in range(piece.length)]
        kept_slots = [-1] * num_rows
        for first, piece in zip(firsts, slices, strict=False):
            for end, slot in piece.kept_states:
                kept_slots[first + end - piece.start - 1] = slot
        return torch.tensor(firsts + slots + of_rows + [-1] * (num_rows - len(of_rows)) + kept_slots)


def _state_slot_of(piece: Piece) -> int:
    assert piece.state_slot is not None, "its model has recurrent layers"
    return piece.state_slot
