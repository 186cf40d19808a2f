"""Signals as bytes on a socket, so that a process can wait for them and for messages at once."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# They ask a server to end. A service manager or a terminal may send them to each of its processes.
REQUESTS_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The exit status that shells use for a process ended by Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT


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


@contextmanager
def without_requests_to_end() -> Iterator[None]:
    """Let processes that are started in here, and those that these start, never see a request to end.

    Blocked signals are inherited from the first moment on, and no handler that a library installs undoes it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
