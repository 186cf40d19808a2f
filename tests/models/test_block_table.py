"""A table is the same whether written at once or page by page, and only contiguous pages are read in place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from keepsight.models.block_table import BlockTable

SIZE = 4
pages = st.lists(st.integers(0, 20), min_size=1, max_size=12, unique=True)


def slots_of(block_ids: list[int]) -> list[int]:
    return [block * SIZE + offset for block in block_ids for offset in range(SIZE)]


@given(first=pages, replacement=pages, where=st.integers(0, 12), data=st.data())
def test_a_table_lists_the_pages_last_written_and_none_from_before(
    first: list[int], replacement: list[int], where: int, data: st.DataObject
) -> None:
    where = min(where, len(first))
    table = BlockTable(SIZE, first)
    table.replace_from(where, replacement)
    expected = slots_of(first[:where] + replacement)
    begin = data.draw(st.integers(0, len(expected) - 1))
    end = data.draw(st.integers(begin + 1, len(expected)))
    assert table.slots(begin, end).tolist() == expected[begin:end]
    assert table.slot(begin) == expected[begin]
    lies_in_a_row = expected[begin:end] == list(range(expected[begin], expected[begin] + end - begin))
    assert table.run(begin, end) == (slice(expected[begin], expected[end - 1] + 1) if lies_in_a_row else None)


def test_a_long_sequence_grows_page_by_page() -> None:
    table = BlockTable(SIZE)
    for block in range(500):
        table.replace_from(block, (1000 - block,))
    assert torch.equal(table.slots(0, 2000), torch.tensor(slots_of(list(range(1000, 500, -1)))))


def test_the_slots_of_an_earlier_step_are_kept_when_pages_are_added() -> None:
    table = BlockTable(SIZE, [3])
    held = table.slots(0, 4)
    table.replace_from(1, [9] * 200)
    assert held.tolist() == [12, 13, 14, 15]
