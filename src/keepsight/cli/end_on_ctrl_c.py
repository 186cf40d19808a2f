"""Ends the process at once on Ctrl-C while libraries are imported."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from keepsight.ipc.take_signals import INTERRUPTED


@contextmanager
def ending_on_ctrl_c() -> Iterator[None]:
    """Exit without cleanup, as there is none to do: numpy would report a broken installation, and torch would crash."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # e.g. if SIGINT is ignored
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
