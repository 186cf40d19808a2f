"""Finds the block with the longest common beginning: the common part is copied, not computed.

The contents of blocks with the same parent are kept sorted, since the longest common beginning is always with a
neighbor in that order. Knows nothing of which blocks are in use.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

from keepsight.scheduling.block_hash import BlockName, count_common


class Alike(NamedTuple):
    num_tokens: int
    block_id: int


class BlockBeginnings:
    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._children.values()))

    def add(self, name: BlockName, block_id: int) -> None:
        insort(self._children.setdefault(name.parent, []), (name.content, block_id))

    def remove(self, name: BlockName, block_id: int) -> None:
        siblings = self._children[name.parent]
        del siblings[bisect_left(siblings, (name.content, block_id))]
        if not siblings:
            del self._children[name.parent]

    def find(self, name: BlockName) -> Alike | None:
        """Return a block that shares the most leading tokens with the named one; None if none shares any."""
        siblings = self._children.get(name.parent, [])
        place = bisect_left(siblings, (name.content,))
        neighbours = siblings[max(0, place - 1) : place + 1]
        found = max(
            (Alike(count_common(name.content, content), block_id) for content, block_id in neighbours), default=None
        )
        return found if found is not None and found.num_tokens else None

    def clear(self) -> None:
        self._children.clear()

    def check_invariants(self) -> None:
        assert all(self._children.values())
