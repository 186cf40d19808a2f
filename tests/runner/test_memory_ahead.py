"""Pages are allocated before they are written to, some at a time, and nothing breaks where that is impossible."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
import torch

from keepsight.runner.memory_ahead import MemoryAhead

PAGE = mmap.PAGESIZE
NUM_ROWS = 100
needs_kernel = pytest.mark.skipif(
    not MemoryAhead([mmap.mmap(-1, PAGE)], 1).extend(), reason="THE KERNEL IS NOT LINUX 5.14: no memory ahead"
)


class Asked(mmap.mmap):
    """Records its `madvise` calls; each row is one page."""

    def __new__(cls, story: list[tuple[str, int]], name: str) -> Self:
        return super().__new__(cls, -1, NUM_ROWS * PAGE)

    def __init__(self, story: list[tuple[str, int]], name: str) -> None:
        self._story, self._name = story, name

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        assert length == PAGE
        self._story.append((self._name, start // PAGE))


class Refused(Asked):
    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        super().madvise(option, start, length)
        raise OSError("the kernel is too old")


def extend_to_end(ahead: MemoryAhead) -> int:
    """Return how many calls of `extend` it took."""
    return next(count for count in range(10_000) if not ahead.extend())


def test_the_rows_of_one_number_are_asked_for_together_and_some_rows_ahead() -> None:
    story: list[tuple[str, int]] = []
    ahead = MemoryAhead([Asked(story, "keys"), Asked(story, "values")], NUM_ROWS, bytes_ahead=6 * PAGE)
    extend_to_end(ahead)
    assert story == [(name, row) for row in range(3) for name in ("keys", "values")]
    ahead.note_used(2)
    extend_to_end(ahead)
    assert [row for name, row in story if name == "keys"] == [0, 1, 2, 3, 4]


def test_the_number_of_used_rows_never_decreases() -> None:
    story: list[tuple[str, int]] = []
    ahead = MemoryAhead([Asked(story, "keys")], NUM_ROWS, bytes_ahead=PAGE)
    ahead.note_used(5)
    ahead.note_used(1)
    extend_to_end(ahead)
    assert len(story) == 6


def test_memory_beyond_the_end_is_never_touched() -> None:
    story: list[tuple[str, int]] = []
    ahead = MemoryAhead([Asked(story, "keys")], NUM_ROWS)
    ahead.note_used(NUM_ROWS)
    # One call extends by only a part of it.
    assert extend_to_end(ahead) > 1
    assert [row for _, row in story] == list(range(NUM_ROWS))


def test_preparation_stops_after_a_refusal() -> None:
    story: list[tuple[str, int]] = []
    ahead = MemoryAhead([Refused(story, "keys")], NUM_ROWS)
    assert not ahead.extend()
    assert not ahead.extend()
    assert len(story) == 1


@pytest.mark.parametrize("arrays", [[], [mmap.mmap(-1, NUM_ROWS)]], ids=["none", "rows of a byte"])
def test_tiny_arrays_need_no_work(arrays: Sequence[mmap.mmap]) -> None:
    assert extend_to_end(MemoryAhead(arrays, NUM_ROWS)) <= 1


@needs_kernel
def test_the_kernel_s_pages_are_there_and_what_was_written_is_kept() -> None:
    memory = mmap.mmap(-1, NUM_ROWS * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[PAGE : PAGE + 7] = b"written"
    assert count_pages(memory) == 1
    extend_to_end(MemoryAhead([memory], NUM_ROWS, bytes_ahead=10 * PAGE))
    assert count_pages(memory) == 10
    assert memory[PAGE : PAGE + 7] == b"written"


def count_pages(memory: mmap.mmap) -> int:
    first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() // PAGE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = pages.read(8 * NUM_ROWS)
    return sum(entry >> 7 for entry in entries[7::8])
