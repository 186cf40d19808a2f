"""Signals as bytes on a socket, so that a process can wait for them and for messages at once."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def take_signals() -> Iterator[socket.socket]:
    """Receive the signals that concern a supervisor as bytes on a socket, one number each, usable with a selector.

    Use it in the main thread, where signals arrive, around work that must not be interrupted: none ends the process.
    """
    numbers = [signal.SIGCHLD, signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    ours, wakeup = socket.socketpair()
    with ours, wakeup:
        ours.setblocking(False)
        wakeup.setblocking(False)
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
