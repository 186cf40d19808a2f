import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from queue import SimpleQueue

import pytest

from keepsight.engine.watchdog import NUM_LOOKS, Watchdog

SOON = 20  # seconds, for operations that take milliseconds
SECONDS = 0.05


class Looks:
    """Beats to be read one after the other; after them each is another. Says when all of them were read."""

    def __init__(self, *beats: int | None) -> None:
        self._beats: Iterator[int | None] = iter(beats)
        self._others = count(1000)
        self.was_read = SimpleQueue[None]()

    def __call__(self) -> int | None:
        try:
            return next(self._beats)
        except StopIteration:
            self.was_read.put(None)
            return next(self._others)


@pytest.fixture
def watch() -> Iterator[Callable[[Looks], SimpleQueue[None]]]:
    dogs: list[Watchdog] = []

    def begin(looks: Looks) -> SimpleQueue[None]:
        ends = SimpleQueue[None]()
        dogs.append(Watchdog(looks, SECONDS, lambda: ends.put(None)))
        return ends

    yield begin
    for dog in dogs:
        dog.close()


def test_it_ends_the_process_once_the_same_step_was_seen_for_the_whole_time(
    watch: Callable[[Looks], SimpleQueue[None]],
) -> None:
    watch(Looks(3, *[7] * (NUM_LOOKS + 2))).get(timeout=SOON)


@pytest.mark.parametrize(
    "beats",
    [
        [7] * NUM_LOOKS,
        [7] * (NUM_LOOKS + 1),
        [*[7] * NUM_LOOKS, 8, *[7] * NUM_LOOKS],
        [None] * 3 * NUM_LOOKS,
        [7, None] * NUM_LOOKS,
    ],
    ids=[
        "a step that ends just in time",
        "one that ends while the log is written",
        "two long steps",
        "waiting for messages",
        "the same step seen between waits",
    ],
)
def test_it_does_not_end_at(beats: list[int | None], watch: Callable[[Looks], SimpleQueue[None]]) -> None:
    looks = Looks(*beats)
    ends = watch(looks)
    for _ in range(2):  # the second look comes after whatever the first one led to
        looks.was_read.get(timeout=SOON)
    assert ends.empty()


def test_the_process_ends_and_says_where_it_was() -> None:
    code = (
        "import time\n"
        "from keepsight.engine.watchdog import Watchdog, end_process\n"
        "def hang(): time.sleep(3600)\n"
        f"Watchdog(lambda: 1, {SECONDS}, end_process)\n"
        "hang()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"a step has not ended for {SECONDS} s" in ended.stderr
    assert "in hang" in ended.stderr


def test_the_process_ends_though_nobody_reads_its_full_log() -> None:
    code = (
        "import logging, threading, time\n"
        "from keepsight.engine.watchdog import Watchdog, end_process\n"
        "from keepsight.ipc import server_log\n"
        "def hang(depth): hang(depth - 1) if depth else time.sleep(3600)\n"
        "server_log.PATIENCE_SECONDS = 0.0\n"
        "server_log.begin_log()\n"
        "for _ in range(2000): logging.info('x' * 200)\n"
        f"Watchdog(lambda: 1, {SECONDS}, end_process)\n"
        "for _ in range(8): threading.Thread(target=hang, args=(90,)).start()\n"
    )
    reader, writer = os.pipe()
    try:
        assert subprocess.run([sys.executable, "-c", code], stderr=writer, timeout=60, check=False).returncode == 1
    finally:
        os.close(reader)
        os.close(writer)
