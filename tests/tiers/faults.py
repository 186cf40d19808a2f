"""Injects faults of disks, servers, clocks and other processes one by one, and checks what must always hold."""

import errno
import os
import queue
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from keepsight.tiers import disk_files, disk_tier
from keepsight.tiers.disk_tier import DiskTier
from keepsight.tiers.host_tier import HostTier
from keepsight.tiers.redis_tier import RedisTier
from keepsight.tiers.tier import StoredArray
from keepsight.tiers.tier_guard import GuardLimits
from keepsight.tiers.tiered_store import TieredStore
from tests.tiers.arrays import array_of, assert_equal, key_of
from tests.tiers.redis_servers import FakeServer

NUM_KEYS = 40
DISK_BYTES = 25 * 4096
_CALLS = ("open", "posix_fallocate", "writev", "readv", "fstat", "utime", "pwrite", "pread", "scandir")


class FaultyOs:
    """`os`, except that the next call of one function fails."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.armed: str | None = None
        self.fault = ""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name != self.armed:
            return real
        self.armed = None
        return {"flip": self._flip, "tear": self._tear}.get(self.fault, self._fail)

    def _fail(self, *_: object, **__: object) -> None:
        raise OSError(self._rng.choice([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES, errno.EMFILE]), "injected")

    def _flip(self, descriptor: int, buffers: list[memoryview]) -> int:
        num_read = os.readv(descriptor, buffers)
        if num_read:
            buffers[0][self._rng.randrange(num_read)] ^= 1 << self._rng.randrange(8)
        return num_read

    def _tear(self, descriptor: int, buffers: list[memoryview]) -> int:
        """Write less than reported, as after a power failure."""
        os.writev(descriptor, [buffers[0][: self._rng.randint(0, len(buffers[0]))]])
        return sum(map(len, buffers))


class Faults:
    """A store over all tiers, a second server on the same folder, and the faults injected into them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.injected: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.longest_call = 0.0
        self._rng = random.Random(seed)
        self._folder = folder / "disk"
        self._os = FaultyOs(self._rng)
        self._patches = [mock.patch.object(module, "os", self._os) for module in (disk_files, disk_tier)]
        for each in self._patches:
            each.start()
        self._server = FakeServer()
        self._clock_jump = 0
        self._own, self._other = self._disk(), self._disk()
        # A small host tier, so that most loads reach the disk and the server.
        self._store = TieredStore(
            HostTier(4 * 3000),
            [self._own, RedisTier(self._server.url, timeout=0.05)],
            limits=GuardLimits(first_pause=0, longest_pause=0),
        )

    def _disk(self) -> DiskTier:
        return DiskTier(self._folder, DISK_BYTES, "auto", now_ns=lambda: time.time_ns() + self._clock_jump)

    def run(self, num_faults: int) -> None:
        kinds: list[Callable[[], None]] = [
            self._failing_call,
            self._failing_call,
            self._flipped_read,
            self._torn_write,
            self._damaged_file,
            self._damaged_file,
            self._removed_file,
            self._removed_folder,
            self._clock_that_jumps,
            self._restarted_server,
            self._nonsense_from_server,
            self._nonsense_from_server,
            self._damaged_value,
            self._silent_server,
            self._another_server,
        ]
        for number in range(num_faults):
            # Remove the whole folder only rarely: otherwise nothing would be left to damage.
            fault = self._rng.choice(kinds)
            if fault == self._removed_folder and self._rng.random() < 0.9:
                fault = self._damaged_file
            fault()
            self.injected[fault.__name__.strip("_")] += 1
            self._use()
            self._mend()
            if number % 50 == 49:
                self._check_budgets()

    def close(self) -> None:
        self._os.armed = None
        self._store.check_invariants()
        self._store.close()
        self._other.close()
        self._server.close()
        for each in self._patches:
            each.stop()

    # Invariants -----------------------------------------------------------------------------------------------

    def _use(self) -> None:
        """Run several loads at once; each is answered once and correctly. Store what was absent."""
        numbers = [self._rng.randrange(NUM_KEYS) for _ in range(3)]
        answers: queue.Queue[tuple[int, StoredArray | None]] = queue.Queue()
        for number in numbers:
            note = partial(lambda number, array, _tier: answers.put((number, array)), number)
            self._timed(partial(self._store.load, key_of(number), 20.0, note))
        for _ in numbers:
            number, array = answers.get(timeout=20)
            self.answers["absent" if array is None else "right"] += 1
            if array is None:
                self._timed(lambda: self._store.store(key_of(number), array_of(number)))  # noqa: B023
            else:
                assert_equal(array, array_of(number))
        assert answers.empty()
        assert self._store.wait_written(20)

    def _timed(self, call: Callable[[], None]) -> None:
        began = time.perf_counter()
        call()
        self.longest_call = max(self.longest_call, time.perf_counter() - began)

    def _mend(self) -> None:
        self._os.armed = None
        self._server.misbehave = lambda reply: reply
        self._server.is_silent.clear()

    def _check_budgets(self) -> None:
        self._recount()
        for disk in (self._own, self._other):
            disk.check_invariants()
        self._store.check_invariants()

    def _recount(self) -> None:
        """Reopen the folder, so that files truncated and removed by faults are counted again."""
        self._other.close()
        self._other = self._disk()
        with suppress(OSError):
            self._other.get(key_of(0))

    # Faults ---------------------------------------------------------------------------------------------------

    def _failing_call(self) -> None:
        self._os.fault, self._os.armed = "fail", self._rng.choice(_CALLS)

    def _flipped_read(self) -> None:
        self._os.fault, self._os.armed = "flip", "readv"

    def _torn_write(self) -> None:
        self._os.fault, self._os.armed = "tear", "writev"

    def _damaged_file(self) -> None:
        for path in self._some_files(3):
            content = bytearray(path.read_bytes())
            if self._rng.random() < 0.3:
                del content[self._rng.randrange(len(content) or 1) :]
            for _ in range(self._rng.randint(1, 8) if content else 0):
                content[self._rng.randrange(len(content))] ^= 1 << self._rng.randrange(8)
            path.write_bytes(content)

    def _removed_file(self) -> None:
        for path in self._some_files(5):
            path.unlink()

    def _removed_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _clock_that_jumps(self) -> None:
        self._clock_jump = self._rng.randint(-(10**18), 10**18)

    def _restarted_server(self) -> None:
        self._server.drop_all()
        if self._rng.random() < 0.3:
            self._server.values.clear()

    def _nonsense_from_server(self) -> None:
        def spoil(reply: bytes) -> bytes | None:
            kind = self._rng.randrange(4)
            if kind == 0:
                return None
            if kind == 1:
                return self._rng.randbytes(self._rng.randint(1, 300)) + b"\r\n"
            spoilt = bytearray(reply)
            for _ in range(self._rng.randint(1, 4)):
                spoilt[self._rng.randrange(len(spoilt))] ^= 1 << self._rng.randrange(8)
            return bytes(spoilt)

        self._server.misbehave = spoil

    def _damaged_value(self) -> None:
        for name in self._rng.sample(sorted(self._server.values), min(3, len(self._server.values))):
            value = bytearray(self._server.values[name])
            value[self._rng.randrange(len(value))] ^= 1 << self._rng.randrange(8)
            self._server.values[name] = bytes(value)

    def _silent_server(self) -> None:
        self._server.is_silent.set()

    def _another_server(self) -> None:
        """Use the second server on the same folder."""
        with suppress(OSError):
            for number in self._rng.sample(range(NUM_KEYS), 4):
                found = self._other.get(key_of(number))
                if found is not None:
                    assert_equal(found, array_of(number))
                self._other.put(key_of(number), array_of(number))

    def _some_files(self, count: int) -> list[Path]:
        files = sorted((self._folder / "entries").glob("*"))
        return self._rng.sample(files, min(count, len(files)))
