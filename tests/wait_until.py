"""Waiting for another thread or process, with a timeout."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 30  # normally far less is needed


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, is_so
        time.sleep(0.005)
