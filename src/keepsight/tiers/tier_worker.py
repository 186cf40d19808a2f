"""One tier behind two threads: reads and writes wait here, never in their caller.

Knows neither other tiers nor deadlines. Entries that wait to be written are already found; others are read only if the
tier is fast enough for the caller. Invariant: every read is answered once; the entries waiting to be written take at
most `max_waiting_bytes`, the oldest being left out. Entries that are not written are counted, for whatever reason, and
`on_drop` is called for those that waited and are no longer found, unless everything is cleared.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from keepsight.tiers.read_pace import ReadPace
from keepsight.tiers.tier import OnDrop, StoredArray, Tier, TierStats
from keepsight.tiers.tier_guard import TierGuard

logger = logging.getLogger(__name__)

_MAX_READS = 1024
# Limit on waiting writes and uses; no use is noted beyond it: only the eviction order suffers.
_MAX_USES = 4096
_CLEAR_AGAIN_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Read:
    key: str
    # Returns False if the result is no longer wanted.
    is_wanted: Callable[[], bool]
    # Called once, on any thread.
    on_read: Callable[[StoredArray | None], None]


class TierWorker:
    def __init__(
        self, tier: Tier, guard: TierGuard, max_waiting_bytes: int, on_drop: OnDrop, *, keeps_first: bool
    ) -> None:
        """`keeps_first`: when too much waits, the new entry is left out, not the one that has waited longest."""
        self.name, self.guard, self._tier = tier.name, guard, tier
        self.num_left_out = 0
        self._pace = ReadPace(guard.title)
        self._max_waiting_bytes, self._on_drop, self._keeps_first = max_waiting_bytes, on_drop, keeps_first
        self._changed = threading.Condition()
        self._reads: deque[Read] = deque()
        # Oldest first; None stands for a use of the key.
        self._writes: OrderedDict[str, StoredArray | None] = OrderedDict()
        self._num_waiting_bytes = 0
        # The write in progress, whose entry is found, too.
        self._writing: tuple[str, StoredArray | None] | None = None
        self._on_cleared: Callable[[], object] = lambda: None
        self._is_opened = self._must_clear = self._is_clearing = self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"{tier.name}-tier-{name}", daemon=True)
            for name, target in (("reads", self._read_all), ("writes", self._write_all))
        ]
        for thread in self._threads:
            thread.start()

    def has(self, key: str) -> bool:
        if self._waiting(key) is not None:
            return True
        return not self._is_to_be_cleared and self.guard.is_usable and self._tier.has(key)

    def try_read(self, read: Read, patience: float) -> bool:
        """Queue a read that should take at most `patience` seconds.

        Return False, and never call back, if the tier is set aside or too slow, or if too many reads wait.
        """
        with self._changed:
            if self._is_closed or len(self._reads) >= _MAX_READS:
                return False
            if self._waiting(read.key) is None:
                if not self.guard.is_usable:
                    return False
                if not self._pace.is_enough(patience):
                    if self._pace.is_trial_due():
                        self._queue(Read(read.key, is_wanted=lambda: True, on_read=lambda _array: None))
                    return False
            self._queue(read)
            return True

    def _queue(self, read: Read) -> None:
        self._reads.append(read)
        self._changed.notify_all()

    def put(self, key: str, array: StoredArray) -> None:
        """Queue a write; it may be left out."""
        with self._changed:
            if self._is_closed or not self.guard.is_usable or array.num_bytes > self._max_waiting_bytes:
                self.num_left_out += 1
                return
            if self._writes.get(key) is not None:
                return
            if self._keeps_first and self._num_waiting_bytes + array.num_bytes > self._max_waiting_bytes:
                self.num_left_out += 1
                return
            self._writes[key] = array
            self._num_waiting_bytes += array.num_bytes
            while self._num_waiting_bytes > self._max_waiting_bytes:
                oldest, left_out = self._writes.popitem(last=False)
                self._num_waiting_bytes -= _num_bytes(left_out)
                self.num_left_out += left_out is not None
                self._report_unless_held(oldest)
            self._changed.notify_all()

    def note_use(self, key: str) -> None:
        """Queue a use behind all writes; an entry that waits to be written itself becomes the last one."""
        with self._changed:
            if key in self._writes:
                self._writes.move_to_end(key)
            elif not self._is_closed and self.guard.is_usable and len(self._writes) < _MAX_USES:
                self._writes[key] = None
                self._changed.notify_all()

    def clear(self, on_cleared: Callable[[], object]) -> None:
        """Clear the tier soon; entries that wait to be written are left out.

        `on_cleared` is called on the tier's thread whenever it has been cleared.
        """
        with self._changed:
            self._writes.clear()
            self._num_waiting_bytes = 0
            self._must_clear, self._on_cleared = True, on_cleared
            self._changed.notify_all()

    @property
    def is_cleared(self) -> bool:
        with self._changed:
            return not self._is_to_be_cleared

    def stats(self) -> TierStats:
        return self._tier.stats()

    def wait_opened(self, seconds: float) -> bool:
        """Wait until the tier's earlier entries are known, or cannot be. Return False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_opened, seconds)

    def wait_written(self, seconds: float) -> bool:
        """Wait until nothing is left to be written; for tests."""
        with self._changed:
            return self._changed.wait_for(self._is_written, seconds)

    def finish(self, seconds: float) -> None:
        """Give what waits to be written some time, but none if the tier is set aside: it would be in vain."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_written() or not self.guard.is_usable, seconds)

    def close(self, seconds: float) -> None:
        """Close the tier. Waiting reads are answered with None. A thread that does not return in time is abandoned."""
        with self._changed:
            self._is_closed = True
            reads, self._reads = self._reads, deque()
            self._changed.notify_all()
        for read in reads:
            read.on_read(None)
        for thread in self._threads:
            thread.join(seconds)
        self._tier.close()

    # The threads ----------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while (read := self._next_read()) is not None:
            array = self._read(read) if read.is_wanted() else None
            with self._safely("an entry could not be delivered"):
                read.on_read(array)

    def _next_read(self) -> Read | None:
        with self._changed:
            self._changed.wait_for(lambda: self._reads or self._is_closed)
            return self._reads.popleft() if self._reads else None

    def _read(self, read: Read) -> StoredArray | None:
        array = self._waiting(read.key)
        if array is None and not self._is_to_be_cleared:
            with self._safely("an entry could not be read"), self.guard.watch() as may:
                array = self._get(read.key) if may else None
        return array

    def _get(self, key: str) -> StoredArray | None:
        begin = time.monotonic()
        array = self._tier.get(key)
        self._pace.note(time.monotonic() - begin)
        return array

    def _write_all(self) -> None:
        self._open()
        while self._take_write():
            is_done = False
            with self._safely("an entry could not be written"), self.guard.watch(may_try=not self._is_use) as may:
                is_done = may and self._write()
            if self._end_write(is_done):
                self._on_cleared()

    def _open(self) -> None:
        """Open the tier, so that an unusable folder or server is noticed before the first request."""
        with self._safely("it could not be opened"), self.guard.watch() as may:
            if may:
                self._tier.open()
        with self._changed:
            self._is_opened = True
            self._changed.notify_all()

    def _take_write(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._writes or self._must_clear or self._is_closed)
            if self._is_closed:
                return False
            self._is_clearing, self._must_clear = self._must_clear, False
            if not self._is_clearing:
                self._writing = self._writes.popitem(last=False)
                self._num_waiting_bytes -= _num_bytes(self._writing[1])
            return True

    @property
    def _is_use(self) -> bool:
        """True if a use is being noted: tiers ignore failures to note one, and some note none."""
        return self._writing is not None and self._writing[1] is None

    def _write(self) -> bool:
        match self._writing:
            case None:
                self._tier.clear()
            case key, None:
                self._tier.note_use(key)
            case key, array:
                return self._tier.put(key, array)
        return True

    def _end_write(self, is_done: bool) -> bool:
        """Return whether the tier has been cleared. If it should have been, wait a little before the next attempt."""
        with self._changed:
            written, self._writing = self._writing, None
            if written is not None and written[1] is not None:
                self.num_left_out += not is_done
                self._report_unless_held(written[0])
            is_cleared = self._is_clearing and is_done
            if self._is_clearing and not is_done:
                # Nothing in the tier is found until it is cleared, so that old entries cannot come back.
                self._must_clear = True
                self._changed.wait(_CLEAR_AGAIN_SECONDS)
            self._is_clearing = False
            self._changed.notify_all()
            return is_cleared

    def _report_unless_held(self, key: str) -> None:
        """Call `on_drop` for a key that no longer waits, unless the tier is known to hold it.

        Some tiers never know: then it is called even for an entry that was written.
        """
        if not self._tier.has(key):
            self._on_drop(key)

    @contextmanager
    def _safely(self, fault: str) -> Iterator[None]:
        """Log any exception: nothing that a tier does may end its thread."""
        try:
            yield
        except Exception:
            logger.exception("the %s: %s", self.guard.title, fault)

    def _waiting(self, key: str) -> StoredArray | None:
        # Under the lock, as an entry moves from `_writes` to `_writing`.
        with self._changed:
            # A write in progress when everything is to be cleared will be cleared, too.
            writing = None if self._must_clear else self._writing
            if writing is not None and writing[0] == key:
                return writing[1]
            return self._writes.get(key)

    @property
    def _is_to_be_cleared(self) -> bool:
        """True if the tier's entries count as gone, as it is about to be cleared."""
        return self._must_clear or self._is_clearing

    def _is_written(self) -> bool:
        return not self._writes and self._writing is None and not self._is_to_be_cleared

    def check_invariants(self) -> None:
        with self._changed:
            assert self._num_waiting_bytes == sum(map(_num_bytes, self._writes.values()))
            assert self._num_waiting_bytes <= self._max_waiting_bytes
            assert len(self._reads) <= _MAX_READS
        self.guard.check_invariants()


def _num_bytes(array: StoredArray | None) -> int:
    return 0 if array is None else array.num_bytes
