"""Rows of sequences: whose they are, and where states are kept."""

import torch

from keepsight.models.sequence_rows import SequenceRows
from tests.models.delta_nets import Piece

CPU = torch.device("cpu")


def test_each_row_belongs_to_a_sequence_and_each_sequence_has_a_slot() -> None:
    rows = SequenceRows([Piece(2, 5), Piece(1, 3)], CPU)
    assert rows.first_rows.tolist() == [0, 2, 3]
    assert rows.slots.tolist() == [5, 3]
    assert rows.of_rows.tolist() == [0, 0, 1]
    assert rows.kept_slots.tolist() == [-1, -1, -1]


def test_a_state_is_kept_after_the_row_of_its_position() -> None:
    rows = SequenceRows([Piece(2, 5), Piece(4, 3, [(11, 7), (13, 8)], start=9)], CPU)
    assert rows.kept_slots.tolist() == [-1, -1, -1, 7, -1, 8]


def test_fewer_rows_and_sequences_than_there_is_room_for_are_followed_by_padding() -> None:
    rows = SequenceRows([Piece(4, 5)], CPU, num_rows=6, num_sequences=3, padding_slot=9)
    rows.replace([Piece(2, 1, [(2, 4)]), Piece(1, 2)])
    assert rows.first_rows.tolist() == [0, 2, 3, 3]
    assert rows.slots.tolist() == [1, 2, 9]
    assert rows.of_rows.tolist() == [0, 0, 1, -1, -1, -1]
    assert rows.kept_slots.tolist() == [-1, 4, -1, -1, -1, -1]
    rows.replace([Piece(3, 1)])
    assert rows.kept_slots.tolist() == [-1] * 6


def test_views_are_aligned_whatever_their_sizes() -> None:
    rows = SequenceRows([Piece(1, 0)] * 3, CPU)
    starts = [each.data_ptr() for each in (rows.first_rows, rows.slots, rows.of_rows, rows.kept_slots)]
    assert all(start % 16 == starts[0] % 16 for start in starts)
