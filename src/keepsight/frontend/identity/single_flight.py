"""Shares looks at media that take a decoder or a checkpoint's own processor: one look for concurrent and later callers.

Knows neither what is looked at nor who keeps it. A failure is raised for all waiting callers; later ones try again.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from copy import copy
from typing import Generic, TypeVar

from keepsight.errors import PictureError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    def __init__(self, recall: Callable[[K], V | None], learn: Callable[[K, V], object]) -> None:
        """`recall` and `learn` access what is known already; their calls never overlap."""
        self._recall, self._learn, self._lock = recall, learn, threading.Lock()
        self._running: dict[K, Future[V]] = {}

    def knows(self, key: K) -> bool:
        with self._lock:
            return self._recall(key) is not None

    def get_or_compute(self, key: K, field: str, look: Callable[[], V]) -> V:
        """Return the known value, or look once for all waiting callers. `field` is the caller's name for it."""
        with self._lock:
            if (known := self._recall(key)) is not None:
                return known
            if (running := self._running.get(key)) is None:
                own = self._running[key] = Future()
        return self._look(key, own, look) if running is None else _wait_for(running, field)

    def _look(self, key: K, own: Future[V], look: Callable[[], V]) -> V:
        try:
            found = look()
            with self._lock:
                self._learn(key, found)
            own.set_result(found)
            return found
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._running[key]


def _wait_for(running: Future[V], field: str) -> V:
    error = running.exception()
    if error is None:
        return running.result()
    # Never raise one object in several threads: it would gather the traceback frames of them all.
    raise type(error)(field, error.message) if isinstance(error, PictureError) else copy(error)
