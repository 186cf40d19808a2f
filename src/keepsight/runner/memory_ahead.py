"""Memory that is written to next, asked for while there is nothing else to do.

The operating system finds memory when it is first written to, and where that is a virtual machine's, its host does so
once more: a new prompt paid up to a quarter of its time for the pages that its keys and values lie in.  Knows nothing
of what is written.  Where the kernel cannot be asked, all is as it is without.
"""

import mmap
from collections.abc import Sequence

# madvise's, since Linux 5.14: the pages are there afterwards, and what was written to some is kept.
_POPULATE_WRITE = 23
# More would be memory that perhaps nobody needs; and for longer at once, a request that comes would wait.
_BYTES_AHEAD, _BYTES_AT_ONCE = 32 * 2**20, 2**18


class MemoryAhead:
    """Of arrays with as many rows each, whose rows of one number are written to together, the first ones first."""

    def __init__(self, arrays: Sequence[mmap.mmap], num_rows: int, bytes_ahead: int = _BYTES_AHEAD) -> None:
        self._arrays, self._num_rows = arrays, num_rows
        bytes_of_row = sum(map(len, arrays)) // num_rows
        self._rows_ahead = max(1, bytes_ahead // max(1, bytes_of_row))
        # Counted in pieces, each a row of one array.
        self._pieces_at_once = max(1, _BYTES_AT_ONCE * len(arrays) // max(1, bytes_of_row))
        self._num_asked_for = 0
        self._num_used_rows = 0

    def note_used(self, num_rows: int) -> None:
        """The first so many were written to, or will be right now."""
        self._num_used_rows = max(self._num_used_rows, num_rows)

    def extend(self) -> bool:
        """A moment's work; False where nothing is left to do."""
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
