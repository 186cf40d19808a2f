"""Populates memory that will be written to next, while there is nothing else to do.

The operating system allocates memory at the first write, and under a virtual machine its host does so once more: a new
prompt spent up to a quarter of its time on page faults for its keys and values. Knows nothing of what is written.
Does nothing if the kernel does not support it.
"""

import mmap
from collections.abc import Sequence

# MADV_POPULATE_WRITE, since Linux 5.14: allocates the pages and keeps what was written to some of them.
_POPULATE_WRITE = 23
# More bytes ahead might never be needed; more bytes at once would make an arriving request wait.
_BYTES_AHEAD, _BYTES_AT_ONCE = 32 * 2**20, 2**18


class MemoryAhead:
    """Populates arrays of `num_rows` rows each; rows with the same index are written together, in ascending order."""

    def __init__(self, arrays: Sequence[mmap.mmap], num_rows: int, bytes_ahead: int = _BYTES_AHEAD) -> None:
        self._arrays, self._num_rows = arrays, num_rows
        bytes_of_row = sum(map(len, arrays)) // num_rows
        self._rows_ahead = max(1, bytes_ahead // max(1, bytes_of_row))
        # Progress is counted in pieces, each a row of one array.
        self._pieces_at_once = max(1, _BYTES_AT_ONCE * len(arrays) // max(1, bytes_of_row))
        self._num_asked_for = 0
        self._num_used_rows = 0

    def note_used(self, num_rows: int) -> None:
        """Note that the first `num_rows` rows were written to, or are about to be."""
        self._num_used_rows = max(self._num_used_rows, num_rows)

    def extend(self) -> bool:
        """Do a moment's work. Return False if nothing is left to do."""
        num_arrays = len(self._arrays)
        enough = min(self._num_rows, self._num_used_rows + self._rows_ahead) * num_arrays
        first = self._num_asked_for
        last = min(enough, first + self._pieces_at_once)
        try:
            for piece in range(first, last):
                row, array = divmod(piece, num_arrays)
                self._ask_for(self._arrays[array], row)
        except OSError:
            self._num_rows = 0
            return False
        self._num_asked_for = max(first, last)
        return first < last

    def _ask_for(self, array: mmap.mmap, row: int) -> None:
        bytes_of_row = len(array) // self._num_rows
        start = row * bytes_of_row // mmap.PAGESIZE * mmap.PAGESIZE
        array.madvise(_POPULATE_WRITE, start, (row + 1) * bytes_of_row - start)
