"""The queue of items that wait to be sent by one thread, and the means to wake that thread.

Knows nothing of sockets except that they can be polled together with a file descriptor. Its size in bytes is bounded,
and putting something in never waits.
"""

import os
import threading
import weakref
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._waiting = deque[tuple[T, int]]()
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._is_closed = False
        # Readable after an item was put, `wake` or `close`, until `note_awake`.
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Called by `free`, or when this is garbage collected, as when its socket could not be made.
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self._close_fd.atexit = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def try_put(self, item: T, num_bytes: int) -> bool:
        """Add an item; return False if closed or full. An empty outbox takes an item of any size."""
        with self._lock:
            if self._is_closed or (self._waiting and self._num_bytes + num_bytes > self._max_bytes):
                return False
            self._waiting.append((item, num_bytes))
            self._num_bytes += num_bytes
            os.eventfd_write(self.fd, 1)
            return True

    def wake(self) -> None:
        """Wake the sending thread for something other than an item."""
        with self._lock:
            if self._close_fd.alive:
                os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Refuse all further items, and wake the sending thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.eventfd_write(self.fd, 1)

    def check_invariants(self) -> None:
        with self._lock:
            assert self._num_bytes == sum(num_bytes for _, num_bytes in self._waiting)
            assert self._num_bytes <= self._max_bytes or len(self._waiting) == 1
            assert self._is_closed or self._close_fd.alive

    # For the one thread that sends ----------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def first(self) -> T:
        return self._waiting[0][0]

    def remove_first(self) -> None:
        with self._lock:
            self._num_bytes -= self._waiting.popleft()[1]

    def note_awake(self) -> None:
        os.eventfd_read(self.fd)

    def free(self) -> None:
        """Discard the waiting items, and close the descriptor."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()
            self._num_bytes = 0
            self._close_fd()
