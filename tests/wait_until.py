"""Waiting for another thread or process, with a timeout."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60  # normally far less is needed, except by a server that starts on a slow and busy machine


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, is_so
        time.sleep(0.005)
