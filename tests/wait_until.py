"""Waiting for what another thread or process does: as long as it takes, and never for ever."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 30  # for what takes much less


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, is_so
        time.sleep(0.005)
