"""Ctrl-C while libraries are imported: the process ends at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# As shells count what ends by Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def ending_on_ctrl_c() -> Iterator[None]:
    """Nothing is to be undone meanwhile; numpy would take it for a broken installation, and torch crash."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # as where it is to be ignored
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
