"""A tier that tests can block, make fail and inspect."""

import threading

from keepsight.tiers.tier import StoredArray, TierStats


class FakeTier:
    def __init__(self, name: str = "disk") -> None:
        self.name = name
        self.entries: dict[str, StoredArray] = {}
        self.error: Exception | None = None
        self.num_gets = 0
        self.uses: list[str] = []
        # Whether `has` knows its entries without a read.
        self.is_known = True
        # While an event is cleared, reads or writes block.
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()
        self.is_writing = threading.Event()

    def open(self) -> None: ...

    def has(self, key: str) -> bool:
        return self.is_known and key in self.entries

    def get(self, key: str) -> StoredArray | None:
        self.num_gets += 1
        assert self.may_read.wait(20)
        self._fail()
        return self.entries.get(key)

    def put(self, key: str, array: StoredArray) -> bool:
        self.is_writing.set()
        assert self.may_write.wait(20)
        self._fail()
        self.entries[key] = array
        return True

    def note_use(self, key: str) -> None:
        self.uses.append(key)

    def clear(self) -> None:
        self.entries.clear()

    def stats(self) -> TierStats:
        return TierStats(0, None, len(self.entries))

    def close(self) -> None: ...

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error
