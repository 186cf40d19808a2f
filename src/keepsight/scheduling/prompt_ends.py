"""Tracks the prompts whose end the runner keeps: the logits after the last token, from which an answer begins.

With them, a prompt found whole needs no step before its first token. Ends are found by a hash of everything they
depend on; the least recently used is evicted first. Invariant: no name is given out twice, so telling the runner to
drop an end never drops one that it kept later.
"""

import itertools
from collections import OrderedDict

from keepsight.scheduling.step_plan import EndName


class PromptEnds:
    def __init__(self, max_entries: int) -> None:
        self.num_found = 0
        self._max_entries = max_entries
        self._names: OrderedDict[bytes, EndName] = OrderedDict()
        self._evicted: list[EndName] = []
        self._numbers = itertools.count()
        # Names with smaller numbers were given out before the last `forget`.
        self._first_number = 0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, end_hash: bytes) -> bool:
        return end_hash in self._names

    def name(self, end_hash: bytes) -> EndName | None:
        """Return a new name for the runner to keep an end under; None if no ends are kept."""
        return EndName(next(self._numbers), end_hash) if self._max_entries else None

    def find(self, end_hash: bytes) -> EndName | None:
        """Return the name of a kept end and mark it most recently used; None if it is not kept."""
        if end_hash not in self._names:
            return None
        self._names.move_to_end(end_hash)
        self.num_found += 1
        return self._names[end_hash]

    def add(self, name: EndName) -> None:
        """Note that the runner has kept an end."""
        if name.number < self._first_number:
            self._evicted.append(name)
            return
        if (older := self._names.pop(name.end_hash, None)) is not None:
            self._evicted.append(older)
        self._names[name.end_hash] = name
        if len(self._names) > self._max_entries:
            self._evicted.append(self._names.popitem(last=False)[1])

    def forget(self) -> None:
        self._first_number = next(self._numbers)
        self._evicted += self._names.values()
        self._names.clear()

    def take_evicted(self) -> list[EndName]:
        """Return the ends evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def check_invariants(self) -> None:
        assert len(self._names) <= self._max_entries
        assert all(name.end_hash == end_hash for end_hash, name in self._names.items())
        gone_and_kept = [*self._evicted, *self._names.values()]
        assert len(set(gone_and_kept)) == len(gone_and_kept)
